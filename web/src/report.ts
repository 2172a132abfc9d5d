// Draws the figures of HTML reports. A figure is plain data: traces (bars, lines, markers), axes, lines and notes.
import { CustomChart, LineChart, ScatterChart } from "echarts/charts";
import { AriaComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent } from "echarts/components";
import * as echarts from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";

echarts.use([
  CustomChart, LineChart, ScatterChart, AriaComponent, GridComponent, LegendComponent, MarkLineComponent, TooltipComponent,
  CanvasRenderer,
]);

type Data = Record<string, any>;

interface Colors {
  ink: string;
  soft: string;
  grid: string;
  line: string;
  card: string;
}

const SI: [number, string][] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"]];

function si(x: number, digits: number): string {
  const [unit, name] = SI.find(([u]) => Math.abs(x) >= u) ?? [1, ""];
  return `${Number((x / unit).toPrecision(digits))}${name}`;
}

/** A number in the formats that figures use: .4g, .3s, .2f, .0%. */
export function format(x: unknown, spec: string): string {
  if (typeof x !== "number") return String(x ?? "");
  const [, digits, kind] = /^\+?\.(\d+)([gsf%])$/.exec(spec) ?? [];
  if (kind === "s") return si(x, Number(digits));
  if (kind === "f") return x.toFixed(Number(digits));
  if (kind === "%") return `${(100 * x).toFixed(Number(digits))} %`;
  return kind === "g" ? String(Number(x.toPrecision(Number(digits)))) : String(x);
}

function hover(trace: Data, i: number): string {
  const text = trace.hovertext ?? trace.text;
  const values: Data = {
    x: trace.x[i], y: trace.y[i], text: Array.isArray(text) ? text[i] : text, hovertext: Array.isArray(text) ? text[i] : text,
    customdata: trace.customdata?.[i],
  };
  return String(trace.hovertemplate ?? "")
    .replace(/<extra>.*?<\/extra>/, "")
    .replace(/%\{(\w+)(?::([^}]+))?\}/g, (_: string, name: string, spec: string) => format(values[name], spec ?? ""));
}

function axis(a: Data, colors: Colors, categories: string[] | null): Data {
  const log = a.type === "log";
  const range = a.range?.map((v: number) => (log ? 10 ** v : v));
  const inverse = range && range[0] > range[1];
  const texts = new Map<number, string>((a.tickvals ?? []).map((v: number, i: number) => [v, a.ticktext?.[i] ?? String(v)]));
  const label = (v: number): string =>
    texts.get(v) ?? (a.exponentformat === "SI" ? si(v, 3) : `${log ? si(v, 3) : Number(v.toPrecision(6))}${a.ticksuffix ?? ""}`);
  return {
    type: categories ? "category" : log ? "log" : "value",
    data: categories ?? undefined,
    min: range && !categories ? Math.min(...range) : a.rangemode === "tozero" ? 0 : undefined,
    max: range && !categories ? Math.max(...range) : undefined,
    scale: !range && a.rangemode !== "tozero",
    inverse,
    name: a.title?.text || undefined,
    nameLocation: "middle",
    nameTextStyle: { color: colors.soft, fontSize: 13 },
    axisLine: { show: true, lineStyle: { color: colors.line } },
    axisTick: { show: false },
    splitLine: { show: a.showgrid !== false && !categories, lineStyle: { color: colors.grid } },
    axisLabel: {
      color: a.ticktext && !log ? colors.ink : colors.soft, fontSize: a.tickfont?.size ?? 12, interval: categories ? 0 : undefined,
      ...(texts.size ? { customValues: [...texts.keys()] } : {}), showMaxLabel: range && !texts.size ? false : undefined, ...(categories ? {} : { formatter: label }),
    },
  };
}

const at = (value: any, i: number): any => (Array.isArray(value) ? value[i] : value);

/** Bars as rectangles, so that they stand at any place, with any width, on each other or on a base. */
function bars(trace: Data, stacks: Map<string, number> | null, colors: Colors): Data {
  const flat = trace.orientation === "h";
  const values = (flat ? trace.x : trace.y) as (number | null)[];
  const places = flat ? trace.y : trace.x;
  const spans = values.map((v, i) => {
    const key = String(places[i]);
    const from = at(trace.base, i) ?? stacks?.get(key) ?? 0;
    stacks?.set(key, from + (v ?? 0));
    return [from, from + (v ?? 0)];
  });
  const error = trace[flat ? "error_x" : "error_y"];
  return {
    type: "custom",
    name: trace.name,
    itemStyle: { color: at(trace.marker?.color, 0) },
    z: 2,
    clip: trace.cliponaxis !== false,
    data: spans.map(([a, b], i) => {
      const place = typeof places[i] === "string" ? i : places[i];
      return { value: flat ? [b, place, a] : [place, b, a], tooltip: { formatter: hover(trace, i) } };
    }),
    encode: flat ? { x: [0, 2], y: 1 } : { x: 0, y: [1, 2] },
    renderItem: (params: Data, api: Data) => {
      const i = params.dataIndex;
      const [from, to] = spans[i];
      const place = flat ? api.value(1) : api.value(0);
      const a = api.coord(flat ? [from, place] : [place, from]);
      const b = api.coord(flat ? [to, place] : [place, to]);
      const thick = (at(trace.width, i) ?? 0.65) * api.size([1, 1])[flat ? 1 : 0];
      const middle = flat ? a[1] : a[0];
      const box = flat
        ? { x: Math.min(a[0], b[0]), y: middle - thick / 2, width: Math.abs(b[0] - a[0]), height: thick }
        : { x: middle - thick / 2, y: Math.min(a[1], b[1]), width: thick, height: Math.abs(b[1] - a[1]) };
      const children: Data[] = [
        { type: "rect", shape: box, style: { fill: at(trace.marker?.color, i), opacity: at(trace.marker?.opacity, i) ?? 1 } },
      ];
      if (error && values[i] != null) {
        const ends = [to - at(error.arrayminus ?? error.array, i), to + at(error.array, i)].map((v) => api.coord(flat ? [v, place] : [place, v]));
        children.push(...whisker(ends, flat, error, colors));
      }
      if (trace.textposition === "outside") {
        const text = { text: at(trace.text, i), fill: colors.ink, fontSize: 12, align: flat ? "left" : "center", verticalAlign: flat ? "middle" : "bottom" };
        children.push({ type: "text", style: { ...text, x: flat ? Math.max(a[0], b[0]) + 6 : middle, y: flat ? middle : Math.min(a[1], b[1]) - 4 } });
      }
      return { type: "group", children };
    },
  };
}

function whisker(ends: number[][], flat: boolean, error: Data, colors: Colors): Data[] {
  const style = { stroke: error.color ?? colors.ink, lineWidth: error.thickness ?? 1.5 };
  const cap = error.width ?? 4;
  const line = (x1: number, y1: number, x2: number, y2: number) => ({ type: "line", shape: { x1, y1, x2, y2 }, style });
  const [[ax, ay], [bx, by]] = ends;
  return [line(ax, ay, bx, by), ...ends.map(([x, y]) => (flat ? line(x, y - cap, x, y + cap) : line(x - cap, y, x + cap, y)))];
}

const SIDES: Record<string, string> = { "middle left": "left", "middle right": "right", "top center": "top", "bottom center": "bottom" };

function side(position: string | undefined): string {
  if (!position) return "top";
  return SIDES[position] ?? (position.startsWith("top") ? "top" : "bottom");
}

function points(trace: Data, colors: Colors): Data[] {
  const mode: string = trace.mode ?? "lines";
  const pairs = trace.x.map((x: unknown, i: number) => [x, trace.y[i]]);
  const out: Data[] = [];
  if (trace.fill === "toself") {
    out.push({
      type: "custom", name: trace.name, silent: true, z: 0, clip: true, data: [pairs[0]],
      renderItem: (_: Data, api: Data) => ({ type: "polygon", shape: { points: pairs.map((p: number[]) => api.coord(p)) }, style: { fill: trace.fillcolor } }),
    });
    return out;
  }
  if (mode.includes("lines")) {
    const dash = trace.line?.dash;
    out.push({
      type: "line", name: trace.name, showSymbol: false, silent: trace.hoverinfo === "skip", step: trace.line?.shape === "hv" ? "end" : undefined,
      lineStyle: { color: trace.line?.color, width: trace.line?.width ?? 2, type: dash === "dot" ? "dotted" : dash === "dash" ? "dashed" : "solid" },
      itemStyle: { color: trace.line?.color }, areaStyle: trace.fill === "tozeroy" ? { color: trace.fillcolor } : undefined,
      data: pairs.map((p: unknown[], i: number) => ({ value: p, tooltip: trace.hovertemplate ? { formatter: hover(trace, i) } : undefined })),
    });
  }
  if (mode.includes("markers") || mode === "text") {
    const m: Data = { color: trace.line?.color, ...trace.marker };
    out.push({
      type: "scatter", name: trace.name, z: 4, clip: false,
      itemStyle: { color: at(m.color, 0), opacity: at(m.opacity, 0) ?? 1, borderColor: m.line?.color, borderWidth: m.line?.width ?? 0 },
      symbol: m.symbol === "diamond" ? "diamond" : m.symbol === "square" ? "rect" : "circle",
      data: pairs.map((p: unknown[], i: number) => ({
        value: p, symbolSize: mode === "text" ? 0 : (at(m.size, i) ?? 8), itemStyle: { color: at(m.color, i) },
        tooltip: { formatter: hover(trace, i) },
        label: mode.includes("text")
          ? { show: true, formatter: String(at(trace.text, i) ?? ""), position: side(at(trace.textposition, i)), color: colors.ink, fontSize: trace.textfont?.size ?? 12 }
          : undefined,
      })),
    });
  }
  if (trace.error_y) out.push(errors(trace, colors));
  return out;
}

function errors(trace: Data, colors: Colors): Data {
  const e = trace.error_y;
  return {
    type: "custom", name: trace.name, silent: true, z: 3, clip: true,
    encode: { x: 0, y: [1, 2] },
    data: trace.x.map((x: number, i: number) => [x, trace.y[i] - at(e.arrayminus ?? e.array, i), trace.y[i] + at(e.array, i)]),
    renderItem: (_: Data, api: Data) => {
      const ends = [api.value(1), api.value(2)].map((v) => api.coord([api.value(0), v]));
      return { type: "group", children: whisker(ends, false, e, colors) };
    },
  };
}

function notes(layout: Data, colors: Colors): Data[] {
  const value = (v: number, a: Data) => (a.type === "log" ? 10 ** v : v);
  const texts = (layout.annotations ?? []).map((n: Data) => ({
    value: [value(n.x, layout.xaxis), value(n.y, layout.yaxis)],
    label: {
      show: true, formatter: n.text, color: colors.soft, fontSize: n.font?.size ?? 12, distance: 4,
      position: n.yanchor === "middle" ? (n.xanchor === "right" ? "left" : "right") : n.xanchor === "right" ? [-8, n.yanchor === "bottom" ? -14 : 4] : "top",
      align: n.xanchor === "right" ? "right" : undefined,
    },
  }));
  const lines = (layout.shapes ?? []).map((s: Data) => ({
    ...(s.x0 === s.x1 ? { xAxis: s.x0 } : { yAxis: s.y0 }),
    lineStyle: { color: s.line?.color ?? colors.soft, width: s.line?.width ?? 1, type: s.line?.dash ? "dotted" : "solid" },
  }));
  return [
    { type: "scatter", symbolSize: 0, silent: true, z: 5, clip: false, data: texts },
    { type: "line", data: [], silent: true, markLine: { silent: true, symbol: "none", label: { show: false }, data: lines } },
  ];
}

/** What ECharts is to draw for a figure. */
export function option(figure: { data: Data[]; layout: Data }, colors: Colors): Data {
  const { data, layout } = figure;
  const categories = (key: "x" | "y") => (data.length && typeof data[0][key]?.[0] === "string" ? (data[0][key] as string[]) : null);
  const stacks = layout.barmode === "stack" ? new Map<string, number>() : null;
  const series = data.flatMap((t) => (t.type === "bar" ? [bars(t, stacks, colors)] : points(t, colors)));
  const named = data.filter((t) => t.name && t.showlegend !== false && layout.showlegend !== false).map((t) => t.name);
  const shown = layout.showlegend !== false && (named.length > 1 || layout.showlegend === true);
  const [x, y] = [axis(layout.xaxis, colors, categories("x")), axis(layout.yaxis, colors, categories("y"))];
  return {
    animation: false,
    textStyle: { fontFamily: layout.font?.family, color: colors.ink },
    grid: {
      left: 12, right: layout.margin?.r ?? 24, top: shown ? 40 : 16, bottom: 12, outerBoundsMode: "same", outerBoundsContain: "all",
    },
    legend: shown ? { top: 0, left: 0, type: "scroll", data: [...new Set(named)], textStyle: { color: colors.ink }, itemWidth: 18, itemHeight: 11 } : undefined,
    tooltip: { trigger: "item", confine: true, backgroundColor: colors.card, borderColor: colors.line, textStyle: { color: colors.ink, fontSize: 13 } },
    aria: { enabled: true },
    xAxis: { ...x, nameGap: 26 },
    yAxis: { ...y, nameGap: 10 },
    series: [...series, ...notes(layout, colors)],
  };
}

export function draw(box: HTMLElement, figure: { data: Data[]; layout: Data }, colors: Colors): void {
  const old = echarts.getInstanceByDom(box);
  const chart = old ?? echarts.init(box, undefined, { height: figure.layout.height });
  chart.setOption(option(figure, colors), { notMerge: true });
  if (!old) new ResizeObserver(() => chart.resize({ height: figure.layout.height })).observe(box);
}
