// The charts of the app, and nothing of ECharts that they do not need.
import { BarChart, CustomChart, HeatmapChart, LineChart, ScatterChart, TreemapChart } from "echarts/charts";
import { AriaComponent, GridComponent, LegendComponent, TooltipComponent, VisualMapComponent } from "echarts/components";
import * as echarts from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";

echarts.use([
  BarChart, CustomChart, HeatmapChart, LineChart, ScatterChart, TreemapChart,
  AriaComponent, GridComponent, LegendComponent, TooltipComponent, VisualMapComponent, CanvasRenderer,
]);

const dark = matchMedia("(prefers-color-scheme: dark)");

/** Draw into an element until the returned function is called; follows its size and the color scheme. */
export function draw(element: HTMLElement, option: () => echarts.EChartsCoreOption): { update: () => void; end: () => void } {
  let chart = echarts.init(element, dark.matches ? "dark" : undefined);
  const update = () => {
    chart.setOption(
      { backgroundColor: "transparent", animation: false, aria: { enabled: true }, ...option() },
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
