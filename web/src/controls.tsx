import { useMemo, useState } from "preact/hooks";
import { chipDevice, ChipFigures, chipName } from "./chip";
import type { Catalog, Chip, Device, Model, PlanQuery, State, Technique } from "./types";
import { bytes, count, number } from "./units";

type Change = (next: PlanQuery) => void;

const TASKS = ["pretrain", "finetune", "generate", "serve"];
const FIELDS: Record<string, [name: string, label: string, first: number][]> = {
  pretrain: [["seq_len", "Sequence length", 2048], ["batch_size", "Batch, sequences", 64], ["micro_batch_size", "Micro-batch", 0]],
  finetune: [["seq_len", "Sequence length", 2048], ["batch_size", "Batch, sequences", 16], ["micro_batch_size", "Micro-batch", 0]],
  generate: [["batch_size", "Batch, sequences", 1], ["prompt_len", "Prompt tokens", 512], ["output_len", "Output tokens", 128]],
  serve: [["rate", "Requests per s", 1], ["concurrency", "Clients", 0], ["prompt_len", "Prompt tokens", 512], ["output_len", "Output tokens", 128]],
};

export function ModelPicker({ value, models, change }: { value: PlanQuery["model"]; models: Model[]; change: (m: PlanQuery["model"]) => void }) {
  const [text, setText] = useState("");
  const [wrong, setWrong] = useState("");
  const known = typeof value === "string" ? models.find((m) => m.name === value || m.aliases.includes(value)) : undefined;
  const paste = (config: string) => {
    setText(config);
    try {
      change(JSON.parse(config));
      setWrong("");
    } catch (e) {
      setWrong(config.trim() ? `not JSON: ${(e as Error).message}` : "");
    }
  };
  return (
    <fieldset>
      <legend>Model</legend>
      <input
        aria-label="Model name"
        list="models"
        value={typeof value === "string" ? value : "pasted config.json"}
        onChange={(e) => change(e.currentTarget.value)}
        style={{ width: "100%" }}
      />
      <datalist id="models">
        {models.map((m) => <option key={m.name} value={m.name}>{`${count(m.parameters)} parameters`}</option>)}
      </datalist>
      {known && (
        <p class="soft" style={{ margin: ".4rem 0 0" }}>
          {count(known.parameters)} parameters, {known.layers} layers of {known.hidden_size}, up to {number(known.max_positions)} tokens
        </p>
      )}
      <details>
        <summary>Paste a config.json</summary>
        <textarea aria-label="config.json" value={text} onInput={(e) => paste(e.currentTarget.value)} />
        {wrong && <p class="mistake">{wrong}</p>}
      </details>
    </fieldset>
  );
}

export function split(on: string): [nodes: number, each: number, name: string] {
  const two = /^(\d+)x(\d+)x(.+)$/.exec(on);
  if (two) return [Number(two[1]), Number(two[2]), two[3]];
  const one = /^(\d+)x(.+)$/.exec(on);
  return one ? [1, Number(one[1]), one[2]] : [1, 1, on];
}

export const joined = (nodes: number, each: number, name: string): string =>
  nodes > 1 ? `${nodes}x${each}x${name}` : each > 1 ? `${each}x${name}` : name;

const FIGURES: [path: string, label: string, unit: number, of: string, read: (d: Device) => number | undefined][] = [
  ["memory_bytes", "Memory", 2 ** 30, "GiB", (d) => d.memory_bytes],
  ["memory_bandwidth", "Bandwidth", 1e9, "GB/s", (d) => d.memory_bandwidth],
  ["peak_flops.bf16", "bf16 peak", 1e12, "TFLOP/s", (d) => d.peak_flops.bf16],
  ["link.bandwidth", "Link", 1e9, "GB/s", (d) => d.link?.bandwidth],
  ["network.bandwidth", "Network", 1e9, "GB/s", (d) => d.network?.bandwidth],
  ["price_per_hour", "Price", 1, "$/h", (d) => d.price_per_hour],
  ["watts", "Power", 1, "W", (d) => d.watts],
];

export function ClusterPicker({ p, devices, chips, change }: { p: PlanQuery; devices: Device[]; chips: Chip[]; change: Change }) {
  const [nodes, each, name] = split(p.on);
  const device = devices.find((d) => d.name === name);
  const chip = chips.find((c) => c.name === chipName(name));
  const set = (n: number, k: number, d: string, figures = p.device) => change({ ...p, on: joined(n, k, d), device: figures });
  return (
    <fieldset>
      <legend>Cluster</legend>
      <label class="field">
        <span>Device</span>
        <select value={name} onChange={(e) => set(chipName(e.currentTarget.value) ? 1 : nodes, each, e.currentTarget.value, {})}>
          {devices.map((d) => (
            <option key={d.name} value={d.name}>{`${d.name} · ${bytes(d.memory_bytes)}`}</option>
          ))}
          <optgroup label="Chips, as designs">
            {chips.map((c) => <option key={c.name} value={chipDevice(c)}>{c.title}</option>)}
          </optgroup>
        </select>
      </label>
      <Slider label="Devices per node" value={each} low={1} high={16} steps={[1, 2, 4, 8, 16]} set={(v) => set(nodes, v, name)} />
      {!chip && <Slider label="Nodes" value={nodes} low={1} high={512} steps={[1, 2, 4, 8, 16, 32, 64, 128, 256, 512]} set={(v) => set(v, each, name)} />}
      {chip && <ChipFigures chip={chip} p={p} change={change} />}
      {device && (
        <details open={Object.keys(p.device).length > 0}>
          <summary>{device.title || device.name}: change its figures</summary>
          {FIGURES.map(([path, label, unit, of, read]) => {
            const own = read(device);
            if (!own) return null;
            const value = p.device[path] ?? own;
            return (
              <label class="field" key={path}>
                <span>{label}: {number(value / unit)} {of}</span>
                <input
                  type="range" min={-2} max={2} step={0.05} value={Math.log2(value / own)} aria-label={`${label} in ${of}`}
                  aria-valuetext={`${number(value / unit)} ${of}`}
                  onInput={(e) => {
                    const x = Number(e.currentTarget.value);
                    const { [path]: _, ...rest } = p.device;
                    change({ ...p, device: x === 0 ? rest : { ...rest, [path]: own * 2 ** x } });
                  }}
                />
              </label>
            );
          })}
          <p class="soft">{device.source}</p>
        </details>
      )}
    </fieldset>
  );
}

function Slider({ label, value, low, high, steps, set }: { label: string; value: number; low: number; high: number; steps: number[]; set: (v: number) => void }) {
  const at = steps.findIndex((s) => s >= value);
  return (
    <div class="field">
      <span>{label}</span>
      <span class="row" style={{ margin: 0, flexWrap: "nowrap" }}>
        <input
          type="range" min={0} max={steps.length - 1} step={1} value={at < 0 ? steps.length - 1 : at} aria-label={label}
          aria-valuetext={String(value)} onInput={(e) => set(steps[Number(e.currentTarget.value)])}
        />
        <input
          type="number" min={low} max={high} value={value} aria-label={`${label}, number`} style={{ width: "4.6rem" }}
          onChange={(e) => set(Math.min(high, Math.max(low, Math.round(Number(e.currentTarget.value)) || low)))}
        />
      </span>
    </div>
  );
}

export function WorkPicker({ p, change }: { p: PlanQuery; change: Change }) {
  const kind = String(p.workload.kind);
  const set = (name: string, text: string) => {
    const value = text === "" || Number(text) === 0 ? undefined : Number(text);
    const workload = { ...p.workload, [name]: value };
    if (name === "rate" && value) delete workload.concurrency;
    if (name === "concurrency" && value) delete workload.rate;
    change({ ...p, workload });
  };
  return (
    <fieldset>
      <legend>Task</legend>
      <div class="tasks" role="radiogroup" aria-label="Task">
        {TASKS.map((task) => (
          <label key={task}>
            <input
              type="radio" name="task" checked={kind === task}
              onChange={() => change({
                ...p,
                workload: { kind: task, ...Object.fromEntries(FIELDS[task].filter((f) => f[2]).map(([n, , v]) => [n, v])) },
                plan: task === kind ? p.plan : p.plan.filter((c) => !/^(zero|lora|qlora)/.test(c) || task !== "serve"),
              })}
            />
            {task}
          </label>
        ))}
      </div>
      {(FIELDS[kind] ?? []).map(([name, label]) => (
        <label class="field" key={name}>
          <span>{label}</span>
          <input type="number" min={0} step="any" value={(p.workload[name] as number) ?? ""} placeholder="chosen" onChange={(e) => set(name, e.currentTarget.value)} />
        </label>
      ))}
      {kind === "serve" && (
        <label class="field">
          <span>Engine</span>
          <select value={String(p.workload.engine ?? "")} onChange={(e) => change({ ...p, workload: { ...p.workload, engine: e.currentTarget.value || undefined } })}>
            {["", "vllm", "sglang", "trtllm", "tgi", "lightllm", "vllm-2023", "hf"].map((x) => <option key={x} value={x}>{x || "ridgeline"}</option>)}
          </select>
        </label>
      )}
    </fieldset>
  );
}

export const nameOf = (call: string): string => call.split(":")[0];

export function optionsOf(call: string): Record<string, string> {
  const [, rest] = call.split(/:(.*)/s);
  return Object.fromEntries((rest ?? "").split(",").filter(Boolean).map((pair) => pair.split(/=(.*)/s).slice(0, 2)));
}

export function callOf(name: string, options: Record<string, string>): string {
  const parts = Object.entries(options).filter(([, v]) => v !== "").map(([k, v]) => `${k}=${v}`);
  return parts.length ? `${name}:${parts.join(",")}` : name;
}

export function Techniques({ p, catalog, states, change }: { p: PlanQuery; catalog: Catalog; states: Record<string, State>; change: Change }) {
  const [shown, setShown] = useState("");
  const families = useMemo(() => {
    const found = new Map<string, Technique[]>();
    for (const t of catalog.techniques) {
      if (t.tasks.includes(String(p.workload.kind))) found.set(t.family, [...(found.get(t.family) ?? []), t]);
    }
    return [...found].sort(([a], [b]) => a.localeCompare(b));
  }, [catalog, p.workload.kind]);
  const call = (t: Technique) => p.plan.find((c) => nameOf(c) === t.name);
  const toggle = (t: Technique) => {
    const has = call(t);
    const example = Object.fromEntries(Object.entries(t.example).map(([k, v]) => [k, String(v)]));
    change({ ...p, plan: has ? p.plan.filter((c) => c !== has) : [...p.plan, callOf(t.name, example)] });
  };
  return (
    <fieldset>
      <legend>Techniques</legend>
      <input aria-label="Filter techniques" placeholder="filter" value={shown} onInput={(e) => setShown(e.currentTarget.value)} />
      {families.map(([family, all]) => {
        const list = all.filter((t) => `${t.name} ${t.title}`.toLowerCase().includes(shown.toLowerCase()));
        if (!list.length) return null;
        return (
          <section key={family}>
            <h3>{family[0].toUpperCase() + family.slice(1)}</h3>
            {list.map((t) => {
              const own = call(t);
              const state = states[t.name];
              const refused = !own && state?.state === "refused";
              const byDefault = !own && state?.state === "on";
              return (
                <div key={t.name} class={`technique${refused ? " refused" : ""}`}>
                  <label title={t.summary}>
                    <input type="checkbox" checked={!!own || byDefault} disabled={refused || byDefault} onChange={() => toggle(t)} aria-describedby={refused ? `why-${t.name}` : undefined} />
                    <span>
                      {t.title}
                      {!t.lossless && <span class="soft"> (changes quality)</span>}
                      {byDefault && <span class="soft"> (on by itself)</span>}
                    </span>
                  </label>
                  {refused && <p class="why" id={`why-${t.name}`}>{state.why}</p>}
                  {own && t.options.length > 0 && (
                    <details class="options">
                      <summary>{own.includes(":") ? own.slice(own.indexOf(":") + 1) : "options"}</summary>
                      {t.options.map((o) => {
                        const values = optionsOf(own);
                        const set = (v: string) => change({ ...p, plan: p.plan.map((c) => (c === own ? callOf(t.name, { ...values, [o.name]: v }) : c)) });
                        const choices = o.type === "boolean" ? ["true", "false"] : o.type.includes(" | ") ? o.type.split(" | ") : null;
                        return (
                          <label class="field" key={o.name} title={o.help}>
                            <span>{o.name}</span>
                            {choices ? (
                              <select value={values[o.name] ?? ""} onChange={(e) => set(e.currentTarget.value)}>
                                <option value="">{o.default == null ? "chosen" : String(o.default)}</option>
                                {choices.filter((c) => c !== String(o.default)).map((c) => <option key={c}>{c}</option>)}
                              </select>
                            ) : (
                              <input value={values[o.name] ?? ""} placeholder={o.default == null ? "chosen" : String(o.default)} onChange={(e) => set(e.currentTarget.value)} />
                            )}
                          </label>
                        );
                      })}
                    </details>
                  )}
                </div>
              );
            })}
          </section>
        );
      })}
    </fieldset>
  );
}
