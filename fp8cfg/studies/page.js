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
    ticks: "outside",
    ticklen: 4,
    tickcolor: "rgba(0,0,0,0)",
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

// Rows of a packed float32 matrix.
function unpack(z) {
  const bytes = Uint8Array.from(atob(z.bdata), (character) => character.charCodeAt(0));
  const values = new Float32Array(bytes.buffer);
  const [rows, columns] = z.shape.split(",").map(Number);
  return Array.from({ length: rows }, (_, i) => values.subarray(i * columns, (i + 1) * columns));
}

// A heat map with logarithmic colors, whose labels have the original values.
function withLogColors(trace) {
  const rows = unpack(trace.z);
  let low = Infinity;
  let high = 0;
  for (const row of rows) {
    for (const value of row) {
      if (value > 0 && value < low) low = value;
      if (value > high && value < Infinity) high = value;
    }
  }
  if (low > high) [low, high] = [0.1, 1]; // all zero or missing
  const bottom = Math.max(Math.log10(low), Math.log10(high) - 12);
  const top = Math.max(Math.log10(high), bottom + 0.01);
  const color = (value) => {
    if (Number.isNaN(value)) return NaN; // a gap
    return value > 0 ? Math.min(Math.max(Math.log10(value), bottom), top) : bottom;
  };
  const every = Math.ceil((top - bottom) / 6);
  const ticks = [];
  const slack = 1e-6; // of rounding to float32
  for (let n = Math.ceil(bottom - slack); n <= top + slack; n++) if (n % every === 0) ticks.push(n);
  const few = ticks.length < 2;
  const values = few ? [bottom, (bottom + top) / 2, top] : ticks;
  const suffix = (trace.colorbar && trace.colorbar.ticksuffix) || "";
  const label = (n) => (n >= -3 && n <= 4 ? String(+(10 ** n).toPrecision(2)) : (10 ** n).toExponential(few ? 1 : 0));
  return {
    ...trace,
    z: rows.map((row) => Array.from(row, color)),
    customdata: rows.map((row) => Array.from(row)),
    zmin: bottom,
    zmax: top,
    colorbar: { ...trace.colorbar, tickvals: values, ticktext: values.map((n) => label(n) + suffix), ticksuffix: "" },
  };
}

function draw(figure) {
  if (!drawn.has(figure)) {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    if (spec.logColors) spec.data = spec.data.map(withLogColors);
    drawn.set(figure, spec);
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
  // Names of layers would take half of a phone's screen. A touch shows them.
  if (figure.clientWidth < 400 && data.some((trace) => trace.type === "heatmap")) {
    layout.yaxis = { ...layout.yaxis, showticklabels: false };
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
