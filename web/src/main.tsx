import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get } from "./api";
import { CatalogPage } from "./pages/CatalogPage";
import { ComparePage } from "./pages/ComparePage";
import { PlanPage } from "./pages/PlanPage";
import { PlaygroundPage } from "./pages/PlaygroundPage";
import { RunsPage } from "./pages/RunsPage";
import { address, useRoute } from "./route";
import "./style.css";
import type { Catalog } from "./types";

const PAGES = [
  ["plan", "Plan"],
  ["compare", "Compare"],
  ["runs", "Runs"],
  ["catalog", "Catalog"],
  ["playground", "Playground"],
] as const;

function App() {
  const route = useRoute();
  const [catalog, setCatalog] = useState<Catalog | null>(null);
  const [failed, setFailed] = useState("");
  useEffect(() => {
    get<Catalog>("catalog").then(setCatalog, (e: Error) => setFailed(e.message));
  }, []);
  useEffect(() => {
    document.title = `${PAGES.find(([name]) => name === route.page)?.[1] ?? "Plan"} · Ridgeline`;
  }, [route.page]);
  return (
    <>
      <a class="skip" href="#main" onClick={(e) => { e.preventDefault(); document.getElementById("main")?.focus(); }}>
        Skip to the content
      </a>
      <header>
        <strong class="brand">Ridgeline</strong>
        <nav aria-label="Pages">
          {PAGES.map(([name, title]) => (
            <a
              key={name}
              href={address(name, name === "compare" || name === "catalog" ? route.query : new URLSearchParams())}
              aria-current={route.page === name ? "page" : undefined}
            >
              {title}
            </a>
          ))}
        </nav>
      </header>
      <main id="main" tabIndex={-1}>
        {failed && <p role="alert" class="mistake">{failed}</p>}
        {!catalog && !failed && <p>Loading…</p>}
        {catalog && <Page page={route.page} query={route.query} catalog={catalog} />}
      </main>
    </>
  );
}

function Page({ page, query, catalog }: { page: string; query: URLSearchParams; catalog: Catalog }) {
  if (page === "compare") return <ComparePage query={query} catalog={catalog} />;
  if (page === "runs") return <RunsPage query={query} />;
  if (page === "catalog") return <CatalogPage query={query} catalog={catalog} />;
  if (page === "playground") return <PlaygroundPage />;
  return <PlanPage query={query} catalog={catalog} />;
}

render(<App />, document.getElementById("app")!);
