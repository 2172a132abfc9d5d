// The charts of the app, and nothing of ECharts that they do not need.
import { BarChart, CustomChart, HeatmapChart, LineChart, ScatterChart, TreemapChart } from "echarts/charts";
import { AriaComponent, GridComponent, LegendComponent, TooltipComponent, VisualMapComponent } from "echarts/components";
import * as echarts from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";

echarts.use([
  BarChart, CustomChart, HeatmapChart, LineChart, ScatterChart, TreemapChart,
  AriaComponent, GridComponent, LegendComponent, TooltipComponent, VisualMapComponent, CanvasRenderer,
]);

const COLORS = ["#3f7fbf", "#c8742a", "#4d9a5a", "#b5506b", "#8a7fc0", "#8c7a55", "#3f949c"];
const dark = matchMedia("(prefers-color-scheme: dark)");

/** Draw into an element until the returned function is called; follows its size and the color scheme. */
export function draw(element: HTMLElement, option: () => echarts.EChartsCoreOption): { update: () => void; end: () => void } {
  const description = element.getAttribute("aria-label") ?? "";
  let chart = echarts.init(element, dark.matches ? "dark" : undefined);
  const update = () => {
    chart.setOption(
      { backgroundColor: "transparent", animation: false, aria: { enabled: true, label: { description } }, color: COLORS, ...option() },
      { notMerge: true },
    );
  };
  const scheme = () => {
    chart.dispose();
    chart = echarts.init(element, dark.matches ? "dark" : undefined);
    update();
  };
  const size = new ResizeObserver(() => chart.resize());
  size.observe(element);
  dark.addEventListener("change", scheme);
  update();
  return {
    update,
    end: () => {
      size.disconnect();
      dark.removeEventListener("change", scheme);
      chart.dispose();
    },
  };
}

export { echarts };
