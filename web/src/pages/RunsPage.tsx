import { useEffect, useState } from "preact/hooks";
import { get, post, useLatest } from "../api";
import { Chart } from "../Chart";
import { address, settle } from "../route";
import type { Ablation, LiveJob, Outcome, Part, Result, RunLine, Study } from "../types";
import { bytes, metric, number, seconds } from "../units";
import { MemoryBar, Metrics, Tree } from "../views";

const PAGE = 100;
const COLUMNS: [name: string, title: string, text: boolean][] = [
  ["created", "Created", true], ["name", "Name", true], ["model", "Model", true], ["plan", "Plan", true],
  ["tokens_per_s", "Tokens/s", false], ["step_time_s", "Step", false], ["peak_bytes", "Peak", false], ["status", "Status", true],
];

interface Answer { total: number; tags: string[]; runs: RunLine[] }

export function RunsPage({ query }: { query: URLSearchParams }) {
  if (query.has("id")) return <Run id={query.get("id")!} />;
  return <><h1>Runs</h1><Live /><List query={query} /></>;
}

function List({ query }: { query: URLSearchParams }) {
  const [filters, setFilters] = useState<Record<string, string>>(() => ({
    name: "", kind: "", source: "", tag: "", sort: "created", descending: "true", offset: "0", ...Object.fromEntries(query),
  }));
  const [found, setFound] = useState<Answer | null>(null);
  const [mistake, setMistake] = useState("");
  const [again, setAgain] = useState(0);
  const ask = () => {
    const asked = new URLSearchParams({ ...filters, limit: String(PAGE) });
    settle("runs", new URLSearchParams(Object.entries(filters).filter(([, v]) => v !== "")));
    return get<Answer>(`runs?${asked}`);
  };
  useLatest(ask, [filters, again], setFound, setMistake);
  const set = (more: Record<string, string>) => setFilters((old) => ({ ...old, offset: "0", ...more }));
  const offset = Number(filters.offset);
  const tag = (run: RunLine) => {
    const given = prompt("Tags, separated by commas", run.tags.join(", "));
    if (given == null) return;
    const tags = given.split(",").map((t) => t.trim()).filter(Boolean);
    post(`runs/${run.id}/tags`, { tags }).then(() => setAgain(again + 1), (e: Error) => setMistake(e.message));
  };
  return (
    <>
      <div class="row" role="search">
        <label>Name, model or plan <input value={filters.name} onInput={(e) => set({ name: e.currentTarget.value })} /></label>
        <Choice label="Kind" value={filters.kind} values={["", "result", "ablation", "study"]} set={(kind) => set({ kind })} />
        <Choice label="Source" value={filters.source} values={["", "predicted", "measured", "both"]} set={(source) => set({ source })} />
        <Choice label="Tag" value={filters.tag} values={["", ...(found?.tags ?? [])]} set={(t) => set({ tag: t })} />
      </div>
      {mistake && <p class="mistake" role="alert">{mistake}</p>}
      {found && (
        <>
          <p class="soft" aria-live="polite" data-total={found.total}>
            {found.total ? `${offset + 1} to ${Math.min(found.total, offset + PAGE)} of ${number(found.total)} runs` : "No runs: `ridgeline predict … --save`, `bench` and `ablate` keep theirs here."}
          </p>
          <div class="scroll">
            <table>
              <thead>
                <tr>
                  {COLUMNS.map(([name, title, text]) => (
                    <th scope="col" key={name} class={text ? "text" : ""} aria-sort={filters.sort === name ? (filters.descending === "true" ? "descending" : "ascending") : undefined}>
                      <button type="button" onClick={() => set({ sort: name, descending: String(filters.sort === name ? filters.descending !== "true" : !text) })}>
                        {title}{filters.sort === name ? (filters.descending === "true" ? " ↓" : " ↑") : ""}
                      </button>
                    </th>
                  ))}
                  <th scope="col" class="text">Tags</th>
                </tr>
              </thead>
              <tbody>
                {found.runs.map((r) => (
                  <tr key={r.id}>
                    <td class="text">{r.created.slice(0, 16).replace("T", " ")}</td>
                    <td class="text"><a href={address("runs", new URLSearchParams({ id: r.id }))}>{r.name || r.id}</a> <span class="soft">{r.source} {r.kind}</span></td>
                    <td class="text">{r.model}</td><td class="text">{r.plan}</td>
                    <td>{metric(r.tokens_per_s, "")}</td><td>{seconds(r.step_time_s)}</td><td>{bytes(r.peak_bytes)}</td><td class="text">{r.status}</td>
                    <td class="text">{r.tags.map((t) => <span class="tag" key={t}>{t}</span>)} <button type="button" onClick={() => tag(r)} aria-label={`Edit tags of ${r.name || r.id}`}>edit</button></td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          <div class="row">
            <button type="button" disabled={offset === 0} onClick={() => setFilters({ ...filters, offset: String(Math.max(0, offset - PAGE)) })}>newer</button>
            <button type="button" disabled={offset + PAGE >= found.total} onClick={() => setFilters({ ...filters, offset: String(offset + PAGE) })}>older</button>
          </div>
        </>
      )}
    </>
  );
}

function Choice({ label, value, values, set }: { label: string; value: string; values: string[]; set: (v: string) => void }) {
  return <label>{label} <select value={value} onChange={(e) => set(e.currentTarget.value)}>{values.map((v) => <option key={v} value={v}>{v || "all"}</option>)}</select></label>;
}

function Live() {
  const [jobs, setJobs] = useState<LiveJob[]>([]);
  useEffect(() => {
    const source = new EventSource("api/live");
    source.onmessage = (e) => setJobs(JSON.parse(e.data).jobs);
    return () => source.close();
  }, []);
  if (!jobs.length) return null;
  return (
    <section aria-label="Running jobs">
      <h2>Running now</h2>
      {jobs.map((j) => (
        <div class="card" key={j.id} data-job={j.title}>
          <b>{j.title}</b> {j.kind} {j.plan} {j.stage}
          {j.steps > 0 && <><progress value={j.step} max={j.steps} aria-label={`Progress of ${j.title}`} /> {j.step} of {j.steps}</>}
          {j.loss != null && ` · loss ${j.loss.toFixed(4)}`}{j.tokens_per_s != null && ` · ${metric(j.tokens_per_s, "tokens/s")}`} · {bytes(j.memory_bytes)}
          {j.losses.length > 1 && <LossChart losses={j.losses} />}
        </div>
      ))}
    </section>
  );
}

function LossChart({ losses }: { losses: [number, number][] }) {
  const option = {
    grid: { left: 50, right: 10, top: 10, bottom: 24 }, tooltip: { trigger: "axis" },
    xAxis: { type: "value" }, yAxis: { type: "value", scale: true }, series: [{ type: "line", showSymbol: false, data: losses }],
  };
  return <Chart option={option} height={140} label="Training loss by step" />;
}

type Document = { kind: "result"; document: Result; tree: Part | null } | { kind: "ablation"; document: Ablation }
  | { kind: "study"; document: Study };

function Run({ id }: { id: string }) {
  const [found, setFound] = useState<Document | null>(null);
  const [mistake, setMistake] = useState("");
  useLatest(() => get<Document>(`runs/${encodeURIComponent(id)}`), [id], setFound, setMistake);
  return (
    <>
      <p><a href="#/runs">All runs</a></p>
      {mistake && <p class="mistake" role="alert">{mistake}</p>}
      {found?.kind === "ablation" && <AblationView a={found.document} />}
      {found?.kind === "study" && <StudyView s={found.document} />}
      {found?.kind === "result" && <ResultView r={found.document} tree={found.tree} />}
      {found && <pre tabIndex={0}>ridgeline report {id} -o report.html</pre>}
    </>
  );
}

function AblationView({ a }: { a: Ablation }) {
  const speed = (r: Result | null) => (r?.metrics.tokens_per_s ? metric(r.metrics.tokens_per_s.value, "tokens/s") : "–");
  const option = {
    grid: { left: 130, right: 30, top: 30, bottom: 30 }, legend: { top: 0 }, tooltip: { trigger: "axis" },
    xAxis: { type: "value" }, yAxis: { type: "category", inverse: true, data: a.outcomes.map((o) => o.name) },
    series: [
      { name: "measured", type: "bar", data: a.outcomes.map((o) => o.speedup?.value ?? (o.name === a.baseline ? 1 : null)) },
      { name: "predicted", type: "scatter", symbol: "diamond", symbolSize: 12, data: a.outcomes.map((o) => o.predicted_speedup ?? (o.name === a.baseline ? 1 : null)) },
    ],
  };
  const interval = (o: Outcome) => (o.speedup ? `${o.speedup.value.toFixed(2)}× [${(o.speedup.low ?? NaN).toFixed(2)}, ${(o.speedup.high ?? NaN).toFixed(2)}]` : "–");
  return (
    <>
      <h1>{a.name}</h1>
      <Chart option={option} height={90 + 30 * a.outcomes.length} label="Speed-up of every plan, measured and predicted" />
      <div class="scroll">
        <table>
          <thead><tr><th scope="col">Plan</th><th scope="col" class="text">Verdict</th><th scope="col">Speed-up</th><th scope="col">Predicted</th><th scope="col">Measured</th></tr></thead>
          <tbody>{a.outcomes.map((o) => <tr key={o.name}><td>{o.name}</td><td class="text">{o.verdict}</td><td>{interval(o)}</td><td>{speed(o.predicted)}</td><td>{speed(o.measured)}</td></tr>)}</tbody>
        </table>
      </div>
      {a.notes.map((n) => <p class="soft" key={n}>{n}</p>)}
    </>
  );
}

function StudyView({ s }: { s: Study }) {
  return (
    <>
      <h1>{s.title || s.name}</h1>
      <p class="soft">{s.source} {number(s.cells.length)} cells, {number(s.cells.filter((c) => c.status === "ok").length)} feasible; the tables are in its report:</p>
      <div class="scroll">
        <table>
          <thead><tr><th scope="col">Finding</th><th scope="col" class="text">Reported</th><th scope="col">Predicted</th><th scope="col">Measured</th><th scope="col" class="text">Verdict</th></tr></thead>
          <tbody>{s.findings.map((f) => <tr key={f.says}><td>{f.says}<div class="soft">{f.note}</div></td><td class="text">{f.reported}</td><td>{f.predicted == null ? "–" : number(f.predicted)}</td><td>{f.measured == null ? "–" : number(f.measured)}</td><td class="text">{f.verdict}</td></tr>)}</tbody>
        </table>
      </div>
    </>
  );
}

function ResultView({ r, tree }: { r: Result; tree: Part | null }) {
  const losses = (r.samples ?? []).filter((s) => s.loss != null).map((s): [number, number] => [s.step, s.loss!]);
  return (
    <>
      <h1>{r.name || "Result"} <span class="soft">{r.source}, {r.status}</span></h1>
      {r.reason && <p class="infeasible">{r.reason}</p>}
      <Metrics result={r} />
      {r.memory.length > 0 && <><h2>Memory per rank</h2><MemoryBar a={{ result: r, cluster: { label: "", size: 1, memory_bytes: r.memory.reduce((s, m) => s + m.bytes, 0), reserved_bytes: 0 } }} /></>}
      {losses.length > 1 && <><h2>Loss</h2><LossChart losses={losses} /></>}
      {r.distributions && Object.keys(r.distributions).length > 0 && <Cdf distributions={r.distributions} />}
      {tree && <><h2>Where the time goes</h2><Treemap part={tree} /><Tree part={tree} /></>}
    </>
  );
}

function Cdf({ distributions }: { distributions: Record<string, number[]> }) {
  const option = {
    grid: { left: 50, right: 20, top: 34, bottom: 40 }, legend: { top: 0 }, tooltip: { trigger: "axis", valueFormatter: (v: number) => v.toFixed(3) },
    xAxis: { type: "log", name: "seconds", nameLocation: "middle", nameGap: 26 }, yAxis: { type: "value", min: 0, max: 1 },
    series: Object.entries(distributions).map(([name, values]) => ({
      name, type: "line", showSymbol: false, step: "end", data: values.map((v, i) => [Math.max(v, 1e-6), (i + 1) / values.length]),
    })),
  };
  return <><h2>Latencies: share of requests below</h2><Chart option={option} height={300} label="Cumulative distribution of latencies" /></>;
}

function Treemap({ part }: { part: Part }) {
  const node = (p: Part): object => ({ name: p.name, value: p.seconds, children: p.children.map(node) });
  const option = {
    tooltip: { formatter: (x: { name: string; value: number }) => `${x.name}: ${seconds(x.value)}` },
    series: [{ type: "treemap", roam: false, breadcrumb: { show: true }, leafDepth: 2, data: part.children.map(node) }],
  };
  return <Chart option={option} height={300} label="Time by phase, module and operator" />;
}
