import { useEffect, useState } from "preact/hooks";
import { get, post } from "../api";
import { Chart } from "../Chart";
import { callOf, nameOf } from "../controls";
import { address, fromQuery, toQuery } from "../route";
import type { Answer, Catalog, Device, Technique } from "../types";
import { bytes, count, number, seconds } from "../units";

export function CatalogPage({ query, catalog }: { query: URLSearchParams; catalog: Catalog }) {
  const [shown, setShown] = useState(query.get("find") ?? "");
  const has = (...texts: string[]) => texts.join(" ").toLowerCase().includes(shown.toLowerCase());
  const plan = fromQuery(query);
  return (
    <>
      <h1>Catalog</h1>
      <label class="row">Find <input value={shown} onInput={(e) => setShown(e.currentTarget.value)} /></label>
      <h2>Techniques</h2>
      {catalog.techniques.filter((t) => has(t.name, t.title, t.family)).map((t) => <Card key={t.name} t={t} plan={plan} />)}
      <h2>Systems</h2>
      <div class="scroll"><table>
        <thead><tr><th scope="col">System</th><th scope="col" class="text">Claim of its paper</th><th scope="col" class="text">Plan</th></tr></thead>
        <tbody>{catalog.systems.filter((s) => has(s.name, s.title)).map((s) => <tr key={s.name}><td>{s.title} <span class="soft">{s.paper}</span></td><td class="text">{s.claim}</td><td class="text">{s.plan.join(" ")}</td></tr>)}</tbody>
      </table></div>
      <h2>Devices</h2>
      <Rooflines devices={catalog.devices.filter((d) => has(d.name, d.title, d.architecture))} />
      <div class="scroll"><table>
        <thead><tr><th scope="col">Device</th><th scope="col">bf16 TFLOP/s</th><th scope="col">Memory</th><th scope="col">GB/s</th><th scope="col" class="text">Link</th><th scope="col">W</th><th scope="col">$/h</th><th scope="col" class="text">Constants</th></tr></thead>
        <tbody>{catalog.devices.filter((d) => has(d.name, d.title, d.architecture)).map((d) => (
          <tr key={d.name}><td title={d.source}>{d.name}</td><td>{d.peak_flops.bf16 ? number(d.peak_flops.bf16 / 1e12) : "–"}</td><td>{bytes(d.memory_bytes)}</td><td>{number(d.memory_bandwidth / 1e9)}</td><td class="text">{d.link?.name ?? "–"}</td><td>{d.watts || "–"}</td><td>{d.price_per_hour || "–"}</td><td class="text">{d.measured ? "fitted" : "of its class"}</td></tr>
        ))}</tbody>
      </table></div>
      <h2>Models</h2>
      <div class="scroll"><table>
        <thead><tr><th scope="col">Model</th><th scope="col" class="text">Family</th><th scope="col">Parameters</th><th scope="col">Layers</th><th scope="col">Hidden</th><th scope="col">Positions</th></tr></thead>
        <tbody>{catalog.models.filter((m) => has(m.name, m.family, ...m.aliases)).map((m) => (
          <tr key={m.name}><td><a href={address("plan", toQuery({ ...plan, model: m.name }))}>{m.name}</a></td><td class="text">{m.family}</td><td>{count(m.parameters)}</td><td>{m.layers}</td><td>{number(m.hidden_size)}</td><td>{number(m.max_positions)}</td></tr>
        ))}</tbody>
      </table></div>
    </>
  );
}

interface Measured { run: string; ablation: string; plan: string[]; speedup: number; low: number | null; high: number | null; predicted: number | null; memory_ratio: number | null; machine: string; created: string }

/** What stored ablations measured with the technique, against their baselines without it. */
function Measurements({ name }: { name: string }) {
  const [rows, setRows] = useState<Measured[] | null>(null);
  const [mistake, setMistake] = useState("");
  useEffect(() => void get<Measured[]>(`techniques/${name}/measured`).then(setRows, (e: Error) => setMistake(e.message)), [name]);
  const times = (x: number | null) => (x === null ? "–" : `${x.toFixed(2)}×`);
  if (mistake) return <p class="mistake" role="alert">{mistake}</p>;
  if (!rows) return <p class="soft">…</p>;
  if (!rows.length) return <p class="soft">Not measured in any stored ablation: <code>ridgeline ablate FILE</code></p>;
  return (
    <div class="scroll"><table>
      <thead><tr><th scope="col" class="text">Measured in</th><th scope="col" class="text">Plan</th><th scope="col">Speed-up</th><th scope="col">Predicted</th><th scope="col">Memory</th><th scope="col" class="text">Machine</th></tr></thead>
      <tbody>{rows.map((r) => (
        <tr key={`${r.run} ${r.plan.join()}`}><td class="text"><a href={address("runs", new URLSearchParams({ id: r.run }))}>{r.ablation || r.run}</a> <span class="soft">{r.created.slice(0, 10)}</span></td><td class="text">{r.plan.join(" ")}</td><td>{times(r.speedup)}{r.low !== null && r.high !== null && <span class="soft"> {r.low.toFixed(2)}–{r.high.toFixed(2)}</span>}</td><td>{times(r.predicted)}</td><td>{times(r.memory_ratio)}</td><td class="text">{r.machine}</td></tr>
      ))}</tbody>
    </table></div>
  );
}

function Card({ t, plan }: { t: Technique; plan: ReturnType<typeof fromQuery> }) {
  const [effect, setEffect] = useState("");
  const [open, setOpen] = useState(false);
  const task = t.tasks.includes(String(plan.workload.kind)) ? plan.workload : { kind: t.tasks[0] };
  const predict = async () => {
    setEffect("…");
    const rest = plan.plan.filter((c) => nameOf(c) !== t.name);
    const call = callOf(t.name, Object.fromEntries(Object.entries(t.example).map(([k, v]) => [k, String(v)])));
    try {
      const [off, on] = await Promise.all([rest, [...rest, call]].map((p) => post<Answer>("plan", { ...plan, workload: task, plan: p })));
      const ratio = (n: string) => on.result.metrics[n].value / off.result.metrics[n].value;
      setEffect(`${ratio("tokens_per_s").toFixed(2)}× the throughput, ${ratio("peak_bytes").toFixed(2)}× the memory; ${on.result.status === "ok" ? "fits" : "does not fit"}`);
    } catch (e) {
      setEffect((e as Error).message);
    }
  };
  return (
    <details class="technique" onToggle={(e) => setOpen(e.currentTarget.open)}>
      <summary>{t.title} <span class="soft">{t.name}, {t.family}{t.lossless ? "" : ", changes quality"}{t.runs ? "" : ", predicted only"}</span></summary>
      <p>{t.summary}</p>
      <p><b>Claim of the paper</b> ({t.paper || "no paper"}): {t.claim || "none"}</p>
      <p>
        <button type="button" onClick={() => void predict()}>Predict it here</button>{" "}
        <span aria-live="polite">{effect}</span>
      </p>
      <p class="soft">on {typeof plan.model === "string" ? plan.model : "the pasted model"}, {plan.on}, {String(task.kind)}{plan.plan.length ? `, beside ${plan.plan.join(" ")}` : ""}</p>
      {open && <Measurements name={t.name} />}
    </details>
  );
}

function Rooflines({ devices }: { devices: Device[] }) {
  const shown = devices.filter((d) => d.peak_flops.bf16).slice(0, 7);
  const intensities = Array.from({ length: 41 }, (_, i) => 2 ** (i / 4));
  const option = {
    grid: { left: 70, right: 20, top: 40, bottom: 46 }, legend: { top: 0 }, tooltip: { trigger: "axis", valueFormatter: (v: number) => `${number(v)} TFLOP/s` },
    xAxis: { type: "log", name: "FLOP per byte", nameLocation: "middle", nameGap: 28 }, yAxis: { type: "log", name: "TFLOP/s" },
    series: shown.map((d) => ({ name: d.name, type: "line", showSymbol: false, data: intensities.map((x) => [x, Math.min(d.peak_flops.bf16, x * d.memory_bandwidth) / 1e12]) })),
  };
  return shown.length ? <><Chart key={shown.map((d) => d.name).join()} option={option} height={320} label={`Rooflines in bf16 of ${shown.map((d) => d.name).join(", ")}`} /><p class="soft">The first {shown.length} devices found; dense bf16. One pass over {bytes(14e9)} of weights takes {shown.map((d) => `${seconds(14e9 / d.memory_bandwidth)} on ${d.name}`).join(", ")}.</p></> : null;
}
