import { useEffect } from "preact/hooks";
import type { Mistake } from "./types";

export class ApiError extends Error {
  constructor(public mistake: Mistake) {
    super(mistake.what);
  }
}

async function answered(response: Response): Promise<any> {
  const body = await response.json().catch(() => ({}));
  if (!response.ok) {
    throw new ApiError(body.error ?? { what: `the server answered ${response.status}`, fix: "" });
  }
  return body;
}

export async function get<T>(path: string): Promise<T> {
  return answered(await fetch(`api/${path}`));
}

export async function post<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  return answered(await send(path, body, signal));
}

function send(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  return fetch(`api/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

/** Server-sent events of a POST, one object each. */
export async function* events(path: string, body: unknown, signal?: AbortSignal): AsyncGenerator<any> {
  const response = await send(path, body, signal);
  if (!response.ok || !response.body) {
    await answered(response);
    return;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) {
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

/** Asks whenever `keys` change. Only the answer to the last question counts: an earlier one may come after it. */
export function useLatest<T>(ask: () => Promise<T> | undefined, keys: unknown[], take: (answer: T) => void, fail: (mistake: string) => void) {
  useEffect(() => {
    let last = true;
    ask()?.then((answer) => last && take(answer), (e: Error) => last && fail(e.message));
    return () => void (last = false);
  }, keys);
}
