import { useEffect, useRef, useState } from "preact/hooks";
import { events, get } from "../api";
import { number, seconds } from "../units";

interface Server { server: string; models: string[]; gauges: Record<string, number> }
interface Turn { role: "user" | "assistant"; content: string; note?: string }

export function PlaygroundPage() {
  const [server, setServer] = useState<Server | null>(null);
  const [mistake, setMistake] = useState("");
  const [turns, setTurns] = useState<Turn[]>([]);
  const [text, setText] = useState("");
  const [model, setModel] = useState("");
  const [tokens, setTokens] = useState(128);
  const [temperature, setTemperature] = useState(1);
  const [cached, setCached] = useState(true);
  const [busy, setBusy] = useState(false);
  const stop = useRef<AbortController | null>(null);
  const look = () => get<Server>("server").then((s) => { setServer(s); setModel((m) => m || s.models[0]); setMistake(""); }, (e: Error) => setMistake(e.message));
  useEffect(() => {
    void look();
    const timer = setInterval(() => void look(), 2000);
    return () => clearInterval(timer);
  }, []);
  const ask = async () => {
    const messages: Turn[] = [...turns, { role: "user", content: text }];
    setText("");
    setBusy(true);
    setTurns([...messages, { role: "assistant", content: "" }]);
    const start = performance.now();
    let first = 0;
    let content = "";
    let made = 0;
    stop.current = new AbortController();
    try {
      const body = { model, messages: messages.map(({ role, content: c }) => ({ role, content: c })), max_tokens: tokens, temperature, prefix_cache: cached };
      for await (const chunk of events("chat", body, stop.current.signal)) {
        const delta = chunk.choices?.[0]?.delta?.content ?? "";
        if (delta && !first) first = performance.now();
        content += delta;
        made = chunk.usage?.completion_tokens ?? made + (delta ? 1 : 0);
        setTurns([...messages, { role: "assistant", content }]);
      }
    } catch (e) {
      if ((e as Error).name !== "AbortError") setMistake((e as Error).message);
    }
    const passed = (performance.now() - (first || start)) / 1e3;
    const note = first ? `${model}${cached ? "" : ", no cached prefix"}: first token after ${seconds((first - start) / 1e3)}, ${number((made - 1) / Math.max(passed, 1e-3))} tokens/s, ${made} tokens` : "no tokens";
    setTurns([...messages, { role: "assistant", content, note }]);
    setBusy(false);
  };
  return (
    <>
      <h1>Playground</h1>
      {mistake && <p class="mistake" role="alert">{mistake}</p>}
      {!server && <p>Start a server (<code>ridgeline serve CHECKPOINT</code>), then this page with <code>ridgeline web --server http://127.0.0.1:8000</code>.</p>}
      {server && (
        <>
          <p class="soft">{server.server}: {Object.entries(server.gauges).map(([k, v]) => `${k.replace("ridgeline_", "")} ${number(v)}`).join(", ")}</p>
          <div class="row">
            <label>Model or adapter <select value={model} onChange={(e) => setModel(e.currentTarget.value)}>{server.models.map((m) => <option key={m}>{m}</option>)}</select></label>
            <label>Tokens <input type="number" min={1} max={32768} value={tokens} onChange={(e) => setTokens(Number(e.currentTarget.value))} /></label>
            <label>Temperature <input type="number" min={0} max={2} step={0.1} value={temperature} onChange={(e) => setTemperature(Number(e.currentTarget.value))} /></label>
            <label><input type="checkbox" checked={cached} onChange={(e) => setCached(e.currentTarget.checked)} /> Reuse cached prefixes</label>
            <button type="button" onClick={() => setTurns([])}>New conversation</button>
          </div>
          {turns.map((t, i) => <div class={`turn ${t.role}`} key={i}>{t.content || "…"}{t.note && <p class="soft">{t.note}</p>}</div>)}
          <form onSubmit={(e) => { e.preventDefault(); if (text.trim() && !busy) void ask(); }}>
            <label>Message <textarea value={text} onInput={(e) => setText(e.currentTarget.value)} /></label>
            <div class="row">
              <button class="main" disabled={busy || !text.trim()}>Send</button>
              {busy && <button type="button" onClick={() => stop.current?.abort()}>Stop</button>}
            </div>
          </form>
        </>
      )}
    </>
  );
}
