"use strict";
// Draws the figures in the page's own colors, again when the scheme changes, and shows definitions on hover or focus.
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };

  function themed(layout) {
    const css = getComputedStyle(document.documentElement);
    const get = (name) => css.getPropertyValue(name).trim();
    const copy = JSON.parse(JSON.stringify(layout));
    copy.font.color = get("--ink");
    copy.modebar = { bgcolor: "rgba(0,0,0,0)", color: get("--line"), activecolor: get("--soft") };
    copy.hoverlabel = Object.assign({}, copy.hoverlabel, { bgcolor: get("--card"), bordercolor: get("--line") });
    copy.hoverlabel.font.color = get("--ink");
    for (const key of Object.keys(copy)) {
      if (/^[xy]axis/.test(key)) {
        copy[key].gridcolor = get("--grid");
        copy[key].linecolor = get("--line");
        copy[key].tickfont = Object.assign({ color: get("--soft") }, copy[key].tickfont);
        copy[key].title.font = { color: get("--soft"), size: 13 };
      }
    }
    if (copy.yaxis.ticktext && copy.yaxis.type !== "log") copy.yaxis.tickfont.color = get("--ink");
    for (const note of copy.annotations || []) note.font.color = get("--soft");
    return copy;
  }

  function inked(data) {
    const color = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
    return data.map((trace) => {
      const copy = Object.assign({}, trace);
      for (const bar of ["error_x", "error_y"]) if (copy[bar]) copy[bar] = Object.assign({ color }, copy[bar]);
      return copy;
    });
  }

  function draw() {
    if (typeof Plotly === "undefined") return;
    for (const box of document.querySelectorAll("[data-chart]")) {
      const figure = figures[box.dataset.chart];
      if (figure) Plotly.react(box, inked(figure.data), themed(figure.layout), config);
    }
  }
  draw();
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
