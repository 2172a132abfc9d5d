import { useState } from "preact/hooks";
import { post, useLatest } from "../api";
import { Chart } from "../Chart";
import { nameOf } from "../controls";
import { address, fromQuery } from "../route";
import type { Answer, Catalog, Mistake, PlanQuery } from "../types";
import { label, metric } from "../units";
import { MemoryBar } from "../views";
import { stored } from "./PlanPage";

type Outcome = Pick<Answer, "result" | "cluster" | "plan" | "command"> & { error?: Mistake };

function queries(query: URLSearchParams): string[] {
  try {
    const given = JSON.parse(query.get("plans") ?? "[]");
    if (given.length) return given;
  } catch {
    // a link that was cut short: what was put aside is still there
  }
  return stored();
}

const SHOWN = ["tokens_per_s", "step_time_s", "mfu", "ttft_p50_s", "ttft_s", "tpot_p50_s", "tpot_s", "e2e_s", "peak_bytes",
  "exposed_communication_s", "dollars_per_million_tokens", "joules_per_token"];

export function ComparePage({ query, catalog }: { query: URLSearchParams; catalog: Catalog }) {
  const list = queries(query);
  const plans = list.map((q) => fromQuery(new URLSearchParams(q)));
  const [found, setFound] = useState<Outcome[]>([]);
  const [mistake, setMistake] = useState("");
  const ask = () => (plans.length ? post<Outcome[]>("compare", { plans }) : undefined);
  useLatest(ask, [JSON.stringify(list)], setFound, setMistake);
  if (!plans.length) {
    return <><h1>Compare</h1><p>Nothing to compare yet: on the page <a href="#/plan">Plan</a>, put plans aside with “compare”.</p></>;
  }
  const drop = (i: number) => {
    const rest = list.filter((_, k) => k !== i);
    sessionStorage.setItem("plans", JSON.stringify(rest));
    location.hash = address("compare", new URLSearchParams({ plans: JSON.stringify(rest) }));
  };
  const rows: [string, string[]][] = [
    ["Model", plans.map((p) => (typeof p.model === "string" ? p.model : "pasted config.json"))],
    ["Cluster", plans.map((p) => p.on)],
    ["Task", plans.map((p) => Object.entries(p.workload).map(([k, v]) => (k === "kind" ? v : `${k}=${v}`)).join(" "))],
    ["Techniques", plans.map((p) => p.plan.join(" ") || "none")],
    ["Fits", plans.map((_, i) => (found[i]?.error ? found[i].error!.what : found[i] ? (found[i].result.status === "ok" ? "yes" : "no") : "…"))],
    ...SHOWN.filter((n) => found.some((f) => f.result?.metrics[n])).map((n): [string, string[]] => [
      label(n), plans.map((_, i) => { const m = found[i]?.result?.metrics[n]; return m ? metric(m.value, m.unit) : "–"; }),
    ]),
  ];
  return (
    <>
      <h1>Compare</h1>
      {mistake && <p class="mistake" role="alert">{mistake}</p>}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th scope="col">Differences are highlighted</th>
              {list.map((q, i) => (
                <th scope="col" class="text" key={q}>
                  <a href={`#/plan?${q}`}>plan {i + 1}</a> <button type="button" onClick={() => drop(i)} aria-label={`Remove plan ${i + 1}`}>×</button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map(([name, cells]) => (
              <tr key={name}>
                <td>{name}</td>
                {cells.map((c, i) => <td key={i} class={`text${new Set(cells).size > 1 && c !== cells[0] ? " differs" : ""}`}>{c}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {found.map((f, i) => f.result && (
        <section key={i}><h3>Memory per rank, plan {i + 1}</h3><MemoryBar a={f} /></section>
      ))}
      <Pairs p={plans[0]} catalog={catalog} />
    </>
  );
}

interface Cell { ratio?: number; fits?: boolean; why?: string }

function Pairs({ p, catalog }: { p: PlanQuery; catalog: Catalog }) {
  const own = new Set(p.plan.map(nameOf));
  const known = catalog.techniques.filter((t) => t.tasks.includes(String(p.workload.kind)) && !own.has(t.name));
  const first = known.filter((t) => t.lossless).slice(0, 6).map((t) => t.name);
  const [names, setNames] = useState(first);
  const [cells, setCells] = useState<Cell[][]>([]);
  const [mistake, setMistake] = useState("");
  const call = (name: string) => {
    const example = Object.entries(catalog.techniques.find((t) => t.name === name)?.example ?? {});
    return example.length ? `${name}:${example.map(([k, v]) => `${k}=${v}`).join(",")}` : name;
  };
  const run = () => {
    setMistake("");
    post<Cell[][]>("matrix", { ...p, techniques: names.map(call) }).then(setCells, (e: Error) => setMistake(e.message));
  };
  const data = cells.flatMap((row, i) => row.map((c, j) => [j, i, c.ratio ?? null]));
  const option = {
    grid: { left: 150, right: 20, top: 10, bottom: 90 },
    tooltip: {
      formatter: (x: { data: [number, number, number | null] }) => {
        const cell = cells[x.data[1]]?.[x.data[0]];
        return `${names[x.data[1]]} with ${names[x.data[0]]}: ${cell?.ratio ? `${cell.ratio.toFixed(2)}×${cell.fits ? "" : ", does not fit"}` : cell?.why}`;
      },
    },
    xAxis: { type: "category", data: names, axisLabel: { rotate: 35 } },
    yAxis: { type: "category", data: names, inverse: true },
    visualMap: { min: 0.5, max: 1.5, show: false, inRange: { color: ["#b5506b", "#d9d9d9", "#3f7fbf"] } },
    series: [{
      type: "heatmap", data,
      label: { show: true, formatter: (x: { data: [number, number, number | null] }) => (x.data[2] == null ? "✗" : `${x.data[2].toFixed(2)}×`) },
    }],
  };
  return (
    <>
      <h2>Pairs of techniques on top of plan 1</h2>
      <p class="soft">Throughput with both over plan 1 alone; the diagonal is each by itself; ✗ is refused.</p>
      <label class="field"><span>Techniques, up to 8</span>
        <select multiple size={6} onChange={(e) => setNames([...e.currentTarget.selectedOptions].map((o) => o.value).slice(0, 8))}>
          {known.map((t) => <option key={t.name} value={t.name} selected={names.includes(t.name)}>{t.name}</option>)}
        </select>
      </label>
      <div class="row"><button type="button" class="main" onClick={run} disabled={!names.length}>Cross them</button></div>
      {mistake && <p class="mistake" role="alert">{mistake}</p>}
      {cells.length === names.length && cells.length > 0 && <Chart option={option} height={120 + 34 * names.length} label="Throughput of pairs of techniques over the plan without them" />}
    </>
  );
}
