import type { Answer, Bar, Part, Result } from "./types";
import { Chart } from "./Chart";
import { bytes, label, metric, percent, seconds } from "./units";

export const MEMORY = ["parameters", "gradients", "optimizer", "activations", "temporaries", "buffers", "kv_cache"];
const shade = (category: string): number => (MEMORY.indexOf(category) + MEMORY.length + 1) % (MEMORY.length + 1);
export const color = (i: number): string => `var(--c${i % 8})`;

const HEAD: Record<string, string[]> = {
  pretrain: ["tokens_per_s", "step_time_s", "mfu", "exposed_communication_s", "dollars_per_million_tokens", "joules_per_token"],
  finetune: ["tokens_per_s", "step_time_s", "mfu", "exposed_communication_s", "dollars_per_million_tokens", "joules_per_token"],
  generate: ["tokens_per_s", "ttft_s", "tpot_s", "e2e_s", "dollars_per_million_tokens", "joules_per_token"],
  serve: ["tokens_per_s", "requests_per_s", "ttft_p50_s", "tpot_p50_s", "e2e_p50_s", "dollars_per_million_tokens", "joules_per_token"],
};

export function Headline({ result, task }: { result: Result; task: string }) {
  const names = (HEAD[task] ?? []).filter((n) => result.metrics[n]);
  return (
    <div class="cards">
      {names.map((n) => {
        const m = result.metrics[n];
        return (
          <div class="card" key={n}>
            <small>{label(n)}</small>
            <b data-metric={n}>{metric(m.value, m.unit)}</b>
            {m.low != null && m.high != null && <small>{metric(m.low, m.unit)} to {metric(m.high, m.unit)}</small>}
          </div>
        );
      })}
    </div>
  );
}

export function MemoryBar({ a }: { a: Pick<Answer, "result" | "cluster"> }) {
  const sums = new Map<string, number>();
  for (const m of a.result.memory) sums.set(m.category, (sums.get(m.category) ?? 0) + m.bytes);
  const parts = [...sums].sort(([x], [y]) => MEMORY.indexOf(x) - MEMORY.indexOf(y)).filter(([, v]) => v > 0);
  const capacity = a.cluster.memory_bytes;
  const total = parts.reduce((s, [, v]) => s + v, 0);
  const whole = Math.max(capacity, total) * 1.02;
  return (
    <div>
      <div class="bar" role="img" aria-label={`${bytes(total)} of ${bytes(capacity)} per rank`}>
        {parts.map(([name, v]) => <i key={name} style={{ width: `${(100 * v) / whole}%`, background: color(shade(name)) }} />)}
        <span class="limit" style={{ left: `${(100 * capacity) / whole}%` }} />
      </div>
      <ul class="legend">
        {parts.map(([name, v]) => <li key={name}><i style={{ background: color(shade(name)) }} />{name} {bytes(v)}</li>)}
        <li>{bytes(total)} of {bytes(capacity)} per rank</li>
      </ul>
    </div>
  );
}

export function Tree({ part, depth = 0 }: { part: Part; depth?: number }) {
  const line = (
    <>
      <span class="share" style={{ width: `${Math.max(2, 90 * part.share)}px` }} />
      {part.name} <span class="soft">{seconds(part.seconds)}, {percent(part.share)}{part.bound ? `, ${part.bound} bound` : ""}{part.note ? `, ${part.note}` : ""}</span>
    </>
  );
  if (!part.children.length) return <div>{line}</div>;
  return (
    <details open={depth === 0}>
      <summary>{line}</summary>
      <ul class="tree">{part.children.map((c, i) => <li key={i}><Tree part={c} depth={depth + 1} /></li>)}</ul>
    </details>
  );
}

const PHASES = ["forward", "backward", "optimizer", "communication", "other"];
const SHADES = ["#3f7fbf", "#c8742a", "#4d9a5a", "#b5506b", "#8a7fc0"];

export function Timeline({ bars }: { bars: Bar[] }) {
  const streams = [...new Set(bars.map((b) => b[0]))];
  const option = {
    grid: { left: 110, right: 12, top: 8, bottom: 26 },
    tooltip: {
      formatter: (x: { data: { name: string; value: number[] } }) =>
        `${x.data.name}<br>${seconds(x.data.value[1])} to ${seconds(x.data.value[2])}`,
    },
    xAxis: { type: "value", max: Math.max(...bars.map((b) => b[4])), axisLabel: { formatter: seconds } },
    yAxis: { type: "category", data: streams, inverse: true },
    series: [{
      type: "custom",
      encode: { x: [1, 2], y: 0 },
      data: bars.map(([stream, phase, name, start, end]) => ({
        name: `${name} (${phase})`,
        value: [streams.indexOf(stream), start, end],
        itemStyle: { color: SHADES[Math.max(0, PHASES.indexOf(phase))] },
      })),
      renderItem: (_: unknown, api: any) => {
        const [a, b] = [api.coord([api.value(1), api.value(0)]), api.coord([api.value(2), api.value(0)])];
        const height = api.size([0, 1])[1] * 0.7;
        return {
          type: "rect",
          shape: { x: a[0], y: a[1] - height / 2, width: Math.max(0.5, b[0] - a[0]), height },
          style: { fill: api.visual("color") },
        };
      },
    }],
  };
  return (
    <>
      <Chart option={option} height={46 + 34 * streams.length} label={`Timeline of one step on ${streams.join(", ")}`} />
      <ul class="legend">{PHASES.filter((p) => bars.some((b) => b[1] === p)).map((p) => <li key={p}><i style={{ background: SHADES[PHASES.indexOf(p)] }} />{p}</li>)}</ul>
    </>
  );
}

export function Metrics({ result }: { result: Result }) {
  return (
    <div class="scroll">
      <table>
        <thead><tr><th scope="col">Metric</th><th scope="col">Value</th><th scope="col">95 % interval</th><th scope="col" class="text">From</th></tr></thead>
        <tbody>
          {Object.entries(result.metrics).map(([n, m]) => (
            <tr key={n}>
              <td title={n}>{label(n)}</td>
              <td>{metric(m.value, m.unit)}</td>
              <td>{m.low != null && m.high != null ? `${metric(m.low, m.unit)} to ${metric(m.high, m.unit)}` : "–"}</td>
              <td class="text">{m.source}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
