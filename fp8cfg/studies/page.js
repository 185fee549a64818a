"use strict";

// Figures are drawn when they come into view. Their JSON stays in the page until then.
const root = document.documentElement;
const darkQuery = matchMedia("(prefers-color-scheme: dark)");
const figures = [...document.querySelectorAll("figure")];
const drawn = new Map(); // figure element -> its data, layout and x values

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : darkQuery.matches;
}

function template() {
  const style = getComputedStyle(root);
  const color = (name) => style.getPropertyValue("--" + name).trim();
  const axis = {
    gridcolor: color("grid"),
    linecolor: color("line"),
    tickcolor: color("line"),
    zerolinecolor: color("line"),
    zerolinewidth: 1,
    automargin: true,
    title: { font: { size: 12 }, standoff: 8 },
  };
  const colorbar = { outlinewidth: 0, thickness: 12, tickfont: { size: 11 } };
  return {
    layout: {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("soft") },
      margin: { l: 52, r: 12, t: 10, b: 40 },
      xaxis: axis,
      yaxis: axis,
      showlegend: false,
      dragmode: touch ? false : "zoom",
      hovermode: "x unified",
      hoverlabel: {
        bgcolor: color("card"),
        bordercolor: color("line"),
        font: { color: color("text"), size: 12 },
        namelength: -1,
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("faint"), activecolor: color("accent") },
    },
    data: {
      heatmap: [{ colorbar }],
      scatter: [{ line: { width: 1.6 } }],
    },
  };
}

// A finger scrolls the page and shows values. It does not zoom.
const touch = matchMedia("(hover: none)").matches;
const CONFIG = {
  responsive: true,
  displaylogo: false,
  displayModeBar: touch ? false : "hover",
  modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
};

function chosen(selector, fallback) {
  const input = document.querySelector(selector);
  return input ? input.value : fallback;
}

function hiddenSeries() {
  const boxes = [...document.querySelectorAll("#legend input")];
  return new Set(boxes.filter((box) => !box.checked).map((box) => box.value));
}

function draw(figure) {
  if (!drawn.has(figure)) {
    drawn.set(figure, JSON.parse(figure.querySelector("script").textContent));
  }
  const spec = drawn.get(figure);
  const hidden = hiddenSeries();
  const names = Object.keys(spec.x);
  const name = chosen("#x-axis input:checked", names[0]);
  const choice = spec.x[name];
  const data = spec.data.map((trace, i) => ({
    ...trace,
    ...(choice ? { x: choice[i] } : {}),
    visible: !hidden.has(trace.legendgroup),
  }));
  const layout = { ...spec.layout, template: template() };
  if (choice) layout.xaxis = { ...layout.xaxis, title: { text: name } };
  const log = figure.querySelector(".log");
  if (log && log.getAttribute("aria-pressed") === "true") {
    layout.yaxis = { ...layout.yaxis, type: "log" };
  }
  Plotly.react(figure.querySelector(".plot"), data, layout, CONFIG);
  figure.dataset.drawn = isDark() ? "dark" : "light";
}

function redraw() {
  for (const figure of drawn.keys()) draw(figure);
}

const observer = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
    }
  },
  { rootMargin: "300px" },
);
for (const figure of figures) observer.observe(figure);

// Theme: the system's, until the reader chooses one.
const themeButton = document.getElementById("theme");
function applyTheme() {
  themeButton.textContent = isDark() ? "Light theme" : "Dark theme";
  redraw();
}
try {
  const saved = localStorage.getItem("fp8cfg-theme");
  if (saved === "light" || saved === "dark") root.dataset.theme = saved;
} catch {
  // Some browsers deny storage to local files.
}
themeButton.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try {
    localStorage.setItem("fp8cfg-theme", root.dataset.theme);
  } catch {
    // As above.
  }
  applyTheme();
});
darkQuery.addEventListener("change", applyTheme);
applyTheme();

for (const input of document.querySelectorAll("#x-axis input, #legend input")) {
  input.addEventListener("change", redraw);
}
for (const button of document.querySelectorAll("button.log")) {
  button.addEventListener("click", () => {
    const pressed = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(pressed));
    draw(button.closest("figure"));
  });
}
for (const tabs of document.querySelectorAll(".tabs")) {
  const panels = [...tabs.children].filter((child) => child.className === "panel");
  tabs.querySelector("fieldset").addEventListener("change", (event) => {
    panels.forEach((panel, i) => (panel.hidden = String(i) !== event.target.value));
    for (const figure of drawn.keys()) {
      if (tabs.contains(figure)) Plotly.Plots.resize(figure.querySelector(".plot"));
    }
  });
}
for (const field of document.querySelectorAll("input.filter")) {
  const rows = [...field.parentElement.querySelectorAll("tbody tr")];
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}

// A printed page has all figures, in light colors and the width of the paper.
let themeBeforePrint;
addEventListener("beforeprint", () => {
  themeBeforePrint = root.dataset.theme;
  root.dataset.theme = "light";
  for (const figure of figures) {
    if (figure.closest("[hidden], details:not([open])")) continue;
    draw(figure);
    Plotly.relayout(figure.querySelector(".plot"), { width: 680 });
  }
});
addEventListener("afterprint", () => {
  if (themeBeforePrint) root.dataset.theme = themeBeforePrint;
  else delete root.dataset.theme;
  redraw();
});
