import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, events, post } from "../api";
import { Chart } from "../Chart";
import { ChipView } from "../chip";
import { ClusterPicker, ModelPicker, Techniques, WorkPicker } from "../controls";
import { address, fromQuery, settle, toQuery } from "../route";
import type { Answer, Catalog, Found, Mistake, PlanQuery, Remedy, Tried } from "../types";
import { bytes, label, metric } from "../units";
import { Headline, MemoryBar, Metrics, Timeline, Tree } from "../views";

interface Answered {
  answer: Answer | null;
  mistake: Mistake | null;
  /** How many answers there were: what tells a test that a new one is shown. */
  count: number;
}

/** The answer to the newest question; while one is under way, only the newest waits. */
function useAnswer(p: PlanQuery): Answered {
  const [found, setFound] = useState<Answered>({ answer: null, mistake: null, count: 0 });
  const busy = useRef(false);
  const next = useRef<PlanQuery | null>(null);
  const ask = async (question: PlanQuery) => {
    if (busy.current) {
      next.current = question;
      return;
    }
    busy.current = true;
    try {
      const answer = await post<Answer>("plan", question);
      setFound((old) => ({ answer, mistake: null, count: old.count + 1 }));
    } catch (e) {
      const mistake = e instanceof ApiError ? e.mistake : { what: String(e), fix: "" };
      setFound((old) => ({ answer: old.answer, mistake, count: old.count + 1 }));
    }
    busy.current = false;
    if (next.current) {
      const waiting = next.current;
      next.current = null;
      void ask(waiting);
    }
  };
  const key = JSON.stringify(p);
  useEffect(() => void ask(p), [key]);
  return found;
}

export function PlanPage({ query, catalog }: { query: URLSearchParams; catalog: Catalog }) {
  const [p, setP] = useState(() => fromQuery(query));
  const own = useRef("");
  useEffect(() => {
    if (query.toString() && query.toString() !== own.current) setP(fromQuery(query));
  }, [query]);
  const change = (next: PlanQuery) => {
    own.current = toQuery(next).toString();
    settle("plan", toQuery(next));
    setP(next);
  };
  const { answer, mistake, count } = useAnswer(p);
  const task = String(p.workload.kind);
  return (
    <>
      <h1>Plan</h1>
      <div class="two">
        <form onSubmit={(e) => e.preventDefault()} aria-label="Question">
          <ModelPicker value={p.model} models={catalog.models} change={(model) => change({ ...p, model })} />
          <ClusterPicker p={p} devices={catalog.devices} chips={catalog.chips} change={change} />
          <WorkPicker p={p} change={change} />
          <Techniques p={p} catalog={catalog} states={answer?.states ?? {}} change={change} />
        </form>
        <section aria-label="Answer" data-answers={count}>
          <div aria-live="polite">
            {mistake && <p class="mistake" role="alert">{mistake.what}{mistake.fix ? `: ${mistake.fix}` : ""}</p>}
            {answer && !mistake && (answer.result.status === "ok"
              ? <p class="fits">Fits on {answer.cluster.label}.</p>
              : <p class="infeasible">Does not fit on {answer.cluster.label}: {answer.result.reason}</p>)}
          </div>
          {answer && (
            <div style={mistake ? { opacity: 0.45 } : undefined}>
              <Headline result={answer.result} task={task} />
              <h2>Memory per rank</h2>
              <MemoryBar a={answer} />
              {answer.chip && <ChipView chip={answer.chip} />}
              {answer.result.status === "infeasible" && <Remedies p={p} change={change} />}
              <BestPlans p={p} change={change} />
              {answer.timeline.length > 0 && <><h2>Timeline of one step</h2><Timeline bars={answer.timeline} /></>}
              {answer.tree && <><h2>Where the time goes</h2><Tree part={answer.tree} /></>}
              <details><summary>All metrics</summary><Metrics result={answer.result} /></details>
              {answer.result.notes && answer.result.notes.length > 0 && (
                <details><summary>Notes of the prediction</summary><ul>{answer.result.notes.map((n) => <li key={n}>{n}</li>)}</ul></details>
              )}
              <Export answer={answer} p={p} />
            </div>
          )}
        </section>
      </div>
    </>
  );
}

function Remedies({ p, change }: { p: PlanQuery; change: (p: PlanQuery) => void }) {
  const [found, setFound] = useState<Remedy[]>([]);
  const key = JSON.stringify(p);
  useEffect(() => {
    const stop = new AbortController();
    const later = setTimeout(() => post<Remedy[]>("remedies", p, stop.signal).then(setFound, () => setFound([])), 150);
    return () => {
      clearTimeout(later);
      stop.abort();
    };
  }, [key]);
  if (!found.length) return null;
  return (
    <>
      <h2>What would make it fit</h2>
      <ul>
        {found.map((r) => (
          <li key={r.change}>
            {r.call ? <button type="button" onClick={() => change({ ...p, plan: [...p.plan, r.call] })}>{r.change}</button> : r.change}
            {": "}{bytes(r.peak_bytes)} {r.fits ? <span class="fits">fits</span> : "still too much"}
            {r.fits && `, ${metric(r.tokens_per_s, "tokens/s")}`}{!r.lossless && " (changes quality)"}
          </li>
        ))}
      </ul>
    </>
  );
}

function BestPlans({ p, change }: { p: PlanQuery; change: (p: PlanQuery) => void }) {
  const [goal, setGoal] = useState("throughput");
  const [at, setAt] = useState<[number, number] | null>(null);
  const [found, setFound] = useState<Found | null>(null);
  const [mistake, setMistake] = useState("");
  const stop = useRef<AbortController | null>(null);
  const run = async () => {
    setAt([0, 1]);
    setMistake("");
    stop.current = new AbortController();
    try {
      for await (const e of events("search", { ...p, plan: [], goal }, stop.current.signal)) {
        if (e.error) setMistake(e.error.what);
        else if (e.answer) setFound(e.answer);
        else setAt([e.at, e.of]);
      }
    } catch (e) {
      setMistake((e as Error).message);
    }
    setAt(null);
  };
  const choose = (t: Tried) => change({
    ...p, on: t.on, plan: t.brief,
    workload: { ...p.workload, ...(t.batch_size ? { batch_size: t.batch_size } : {}), ...(t.micro_batch_size ? { micro_batch_size: t.micro_batch_size } : {}) },
  });
  return (
    <>
      <h2>Find the best plan</h2>
      <div class="row">
        <label>Goal <select value={goal} onChange={(e) => setGoal(e.currentTarget.value)}>{["throughput", "latency", "cost", "memory"].map((g) => <option key={g}>{g}</option>)}</select></label>
        <button type="button" class="main" disabled={!!at} onClick={() => void run()}>Find the best</button>
        {at && <progress value={at[0]} max={at[1]} aria-label="Search" />}
      </div>
      {mistake && <p class="mistake" role="alert">{mistake}</p>}
      {found && (
        <div data-found={found.best.length}>
          <p class="soft">{found.counts.considered} candidate plans in {found.seconds.toFixed(1)} s, {found.counts.feasible ?? 0} feasible</p>
          {!found.best.length && <Nothing found={found} />}
          {found.best.length > 0 && (
            <div class="scroll">
              <table>
                <thead><tr><th scope="col">Plan</th><th scope="col" class="text">On</th><th scope="col">{label(found.metric)}</th><th scope="col">Peak</th><th scope="col" class="text">Use</th></tr></thead>
                <tbody>
                  {found.best.map((t, i) => (
                    <tr key={i}>
                      <td>{t.brief.join(" ") || "no technique"}{i > 0 && <div class="soft">{t.against_first}</div>}</td><td class="text">{t.on}</td>
                      <td>{metric(t.metrics[found.metric], unitOf(found.metric))}</td><td>{bytes(t.metrics.peak_bytes)}</td>
                      <td class="text"><button type="button" onClick={() => choose(t)}>use</button></td>
                    </tr>
                  ))}
                </tbody>
              </table>
            </div>
          )}
          {found.front.length > 1 && <Front found={found} />}
          <details><summary>Why not the others</summary><ul>{found.why_not.map((w, i) => <li key={i}>{w.what}: {w.because}{w.therefore ? `; ${w.therefore}` : ""}</li>)}</ul></details>
        </div>
      )}
    </>
  );
}

function Nothing({ found }: { found: Found }) {
  return (
    <>
      <p class="infeasible">No feasible plan.</p>
      {found.closest_miss && <p>Closest: {found.closest_miss.plan.join(" ")}: {found.closest_miss.misses}</p>}
      <ul>{found.relaxations.map((r) => <li key={r.change}>{r.change}: {r.plan.join(" ") || "no technique"}</li>)}</ul>
    </>
  );
}

const unitOf = (name: string): string =>
  name.endsWith("_bytes") ? "bytes" : name === "tokens_per_s" ? "tokens/s" : name.startsWith("dollars") ? "$" : name.endsWith("_s") ? "s" : "";

function Front({ found }: { found: Found }) {
  const name = found.metric === "peak_bytes" ? "tokens_per_s" : found.metric;
  const option = {
    grid: { left: 70, right: 20, top: 16, bottom: 46 },
    tooltip: { formatter: (x: { data: [number, number, string] }) => `${x.data[2]}<br>${metric(x.data[1], unitOf(name))}, ${bytes(x.data[0])}` },
    xAxis: { type: "value", name: "peak memory per rank", nameLocation: "middle", nameGap: 28, scale: true, axisLabel: { formatter: bytes } },
    yAxis: { type: "value", scale: true, axisLabel: { formatter: (v: number) => metric(v, unitOf(name)) } },
    series: [{ type: "scatter", symbolSize: 10, data: found.front.map((t) => [t.metrics.peak_bytes, t.metrics[name], t.brief.join(" ")]) }],
  };
  return <Chart option={option} height={260} label={`${label(name)} against peak memory of the plans that no other beats in both`} />;
}

function Export({ answer, p }: { answer: Answer; p: PlanQuery }) {
  const link = address("plan", toQuery(p));
  const more = toQuery(p);
  return (
    <>
      <h2>Take it along</h2>
      <pre tabIndex={0}>{answer.command}</pre>
      <div class="row">
        <a href={`data:application/toml;charset=utf-8,${encodeURIComponent(answer.toml)}`} download="plan.toml">plan.toml</a>
        <a href={link}>link to this plan</a>
        <a href={address("compare", new URLSearchParams({ plans: JSON.stringify([...stored(), more.toString()].slice(-6)) }))} onClick={() => keep(more.toString())}>compare</a>
      </div>
      <details><summary>The experiment file</summary><pre tabIndex={0}>{answer.toml}</pre></details>
    </>
  );
}

/** Plans put aside for the comparison, as queries. */
export function stored(): string[] {
  try {
    return JSON.parse(sessionStorage.getItem("plans") ?? "[]");
  } catch {
    return [];
  }
}

function keep(query: string): void {
  sessionStorage.setItem("plans", JSON.stringify([...new Set([...stored(), query])].slice(-6)));
}
