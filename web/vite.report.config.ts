import { defineConfig } from "vite";

// One script that HTML reports carry in themselves.
export default defineConfig({
  define: { "process.env.NODE_ENV": JSON.stringify("production") },
  build: {
    outDir: "../src/ridgeline/report",
    emptyOutDir: false,
    lib: { entry: "src/report.ts", formats: ["iife"], name: "RidgelineCharts", fileName: () => "charts.js" },
  },
});
