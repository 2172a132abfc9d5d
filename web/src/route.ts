import { useEffect, useState } from "preact/hooks";
import type { PlanQuery } from "./types";

// The whole state of a page is in the address behind "#": a link is a copy of what is seen.

export interface Route {
  page: string;
  query: URLSearchParams;
}

export function current(): Route {
  const [page, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { page: page || "plan", query: new URLSearchParams(query ?? "") };
}

export function useRoute(): Route {
  const [route, set] = useState(current);
  useEffect(() => {
    const changed = () => set(current());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

export function address(page: string, query: URLSearchParams): string {
  const text = query.toString();
  return `#/${page}${text ? `?${text}` : ""}`;
}

/** Replace the address: for every drag of a slider, one step back would be too many. */
export function settle(page: string, query: URLSearchParams): void {
  const next = address(page, query);
  if (next !== location.hash) history.replaceState(null, "", next);
}

export const START: PlanQuery = {
  model: "llama2-13b",
  on: "8xrtx4090",
  device: {},
  workload: { kind: "finetune", seq_len: 350, batch_size: 8 },
  plan: ["zero:stage=3"],
};

export function toQuery(p: PlanQuery): URLSearchParams {
  const query = new URLSearchParams();
  if (typeof p.model === "string") query.set("model", p.model);
  else query.set("config", JSON.stringify(p.model));
  query.set("on", p.on);
  for (const [key, value] of Object.entries(p.device)) query.append("device", `${key}=${value}`);
  for (const [key, value] of Object.entries(p.workload)) {
    if (value != null && value !== "") query.set(key === "kind" ? "task" : key, String(value));
  }
  for (const call of p.plan) query.append("with", call);
  return query;
}

export function fromQuery(query: URLSearchParams): PlanQuery {
  if (!query.has("model") && !query.has("config")) return structuredClone(START);
  const workload: Record<string, unknown> = {};
  for (const [key, value] of query) {
    if (key === "task") workload.kind = value;
    else if (!["model", "config", "on", "device", "with"].includes(key)) {
      workload[key] = value !== "" && Number.isFinite(Number(value)) ? Number(value) : value;
    }
  }
  let model: PlanQuery["model"] = query.get("model") ?? "";
  if (query.has("config")) {
    try {
      model = JSON.parse(query.get("config") ?? "");
    } catch {
      model = "";
    }
  }
  return {
    model,
    on: query.get("on") ?? START.on,
    device: Object.fromEntries(
      query.getAll("device").map((pair) => [pair.split("=")[0], Number(pair.split("=")[1])]),
    ),
    workload: { kind: "pretrain", ...workload },
    plan: query.getAll("with"),
  };
}
