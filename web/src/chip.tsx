import { Chart } from "./Chart";
import type { Chip, ChipAnswer, PlanQuery } from "./types";
import { bytes, count, metric, number, percent } from "./units";
import { color } from "./views";

const PREFIX = "chip:";

/** The name of a device that is a chip of the catalog, as a design; empty for other devices. */
export const chipName = (device: string): string => (device.startsWith(PREFIX) ? device.slice(PREFIX.length) : "");

export const chipDevice = (chip: Chip): string => PREFIX + chip.name;

function written(path: string, value: number): string {
  if (path.endsWith("bytes")) return bytes(value);
  return path === "clock" ? `${number(value / 1e9)} GHz` : number(value);
}

/** Sliders for the figures of a design, up to four times its own. */
export function ChipFigures({ chip, p, change }: { chip: Chip; p: PlanQuery; change: (p: PlanQuery) => void }) {
  return (
    <details open>
      <summary>{chip.title}: change the design</summary>
      {chip.figures.map(({ path, label, value: own }) => {
        const value = p.device[path] ?? own;
        const step = own <= 64 ? 1 : own / 32;
        const set = (x: number) => {
          const { [path]: _, ...rest } = p.device;
          change({ ...p, device: x === own ? rest : { ...rest, [path]: x } });
        };
        return (
          <label class="field" key={path}>
            <span>{label}: {written(path, value)}</span>
            <input
              type="range" min={step} max={4 * own} step={step} value={value} aria-label={label}
              aria-valuetext={written(path, value)} onInput={(e) => set(Number(e.currentTarget.value))}
            />
          </label>
        );
      })}
      <p class="soft">{chip.source}</p>
    </details>
  );
}

const dollars = (x: number | null): string => (x == null ? "no price" : `$${number(Math.round(x))}`);

/** What a design takes and gives: area, cost, power, tokens per dollar, and where its operators are under its roofs. */
export function ChipView({ chip }: { chip: ChipAnswer }) {
  return (
    <>
      <h2>The chip</h2>
      <div class="scroll" data-mm2={chip.total_mm2.toFixed(1)}>
        <table>
          <tbody>
            <tr><th scope="row">Die</th><td>{number(chip.total_mm2)} mm²</td></tr>
            <tr><th scope="row">Die, {percent(chip.yield)} of {chip.dies_per_wafer} on a wafer work</th><td>{dollars(chip.die_dollars)}</td></tr>
            <tr><th scope="row">Memory, {bytes(chip.memory_bytes)}</th><td>{dollars(chip.memory_dollars)}</td></tr>
            <tr><th scope="row">Power</th><td>{number(chip.watts)} W</td></tr>
            <tr><th scope="row">Throughput per dollar of die and memory</th><td>{chip.tokens_per_s_per_dollar == null ? "no price" : metric(chip.tokens_per_s_per_dollar, "tokens/s")}</td></tr>
            <tr><th scope="row">Memory and links on the edge</th><td>{number(chip.edge_mm)} of {number(chip.shoreline_mm)} mm</td></tr>
          </tbody>
        </table>
      </div>
      {chip.edge_mm > chip.shoreline_mm && <p class="mistake">The interfaces of memory and links do not fit on the edge of the die.</p>}
      <Area chip={chip} />
      <Chart option={roofline(chip)} height={300} label="Operators under the roofs of the chip: FLOP/s against FLOP per byte" />
      <p class="soft">Prices of {chip.prices}, without package, test, board and design. Dots are operators; larger ones take longer.</p>
    </>
  );
}

function Area({ chip }: { chip: ChipAnswer }) {
  const blocks = Object.entries(chip.area_mm2);
  return (
    <div>
      <div class="bar" role="img" aria-label={`Area of the die: ${blocks.map(([name, mm2]) => `${name} ${number(mm2)} mm²`).join(", ")}`}>
        {blocks.map(([name, mm2], i) => <i key={name} style={{ width: `${(100 * mm2) / chip.total_mm2}%`, background: color(i) }} />)}
      </div>
      <ul class="legend">{blocks.map(([name, mm2], i) => <li key={name}><i style={{ background: color(i) }} />{name} {number(mm2)} mm²</li>)}</ul>
    </div>
  );
}

function roofline(chip: ChipAnswer) {
  const peak = chip.peak_flops.bf16 ?? chip.peak_flops.fp16 ?? Math.max(...Object.values(chip.peak_flops));
  const ridge = peak / chip.memory_bandwidth;
  const xs = [ridge, ...chip.operators.map((o) => o.intensity)];
  const [left, right] = [Math.min(...xs) / 3, Math.max(...xs) * 4];
  const longest = Math.max(...chip.operators.map((o) => o.seconds), 0);
  const roof = [[left, left * chip.memory_bandwidth], [ridge, peak], [right, peak]];
  return {
    grid: { left: 70, right: 20, top: 16, bottom: 46 },
    tooltip: { formatter: (x: { data: [number, number, string] }) => x.data[2] ? `${x.data[2]}<br>${number(x.data[0])} FLOP/byte, ${count(x.data[1])}FLOP/s` : "" },
    xAxis: { type: "log", min: left, max: right, name: "FLOP per byte", nameLocation: "middle", nameGap: 28, axisLabel: { formatter: (v: number) => number(v) } },
    yAxis: { type: "log", axisLabel: { formatter: (v: number) => `${count(v)}FLOP/s` } },
    series: [
      { type: "line", data: roof, symbol: "none", lineStyle: { width: 2 }, silent: true },
      {
        type: "scatter", data: chip.operators.map((o) => [o.intensity, o.rate, o.name, o.seconds]),
        symbolSize: (d: number[]) => 6 + 16 * Math.sqrt(d[3] / longest),
      },
    ],
  };
}
