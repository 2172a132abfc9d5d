"use strict";
// Draws the figures in the page's own colors, again when the scheme changes, and shows definitions on hover or focus.
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);

  function draw() {
    if (typeof RidgelineCharts === "undefined") return;
    const css = getComputedStyle(document.documentElement);
    const get = (name) => css.getPropertyValue(name).trim();
    const colors = { ink: get("--ink"), soft: get("--soft"), grid: get("--grid"), line: get("--line"), card: get("--card") };
    for (const box of document.querySelectorAll("[data-chart]")) {
      const figure = figures[box.dataset.chart];
      if (figure && box.offsetParent) RidgelineCharts.draw(box, figure, colors);
    }
  }
  draw();
  document.addEventListener("toggle", draw, true); // what stands folded is drawn when it is opened
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  function show(event) {
    const mark = event.target.closest && event.target.closest(".hint");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const at = mark.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 16)) + scrollX + "px";
    tip.style.top = at.bottom + scrollY + 6 + "px";
  }
  document.addEventListener("mouseover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
})();
