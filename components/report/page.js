"use strict";
// Comfort for readers whose browser runs scripts; without it charts keep their native tooltips,
// and tables are shown whole.
(() => {
  const LONG = 8; // rows from which a table gets a filter

  // Values of charts: one tip for mouse, touch and keyboard in place of the slow native tooltip.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);
  const show = mark => {
    tip.textContent = mark.dataset.value;
    tip.hidden = false;
    const box = mark.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const left = box.left + box.width / 2 - own.width / 2;
    const above = box.top - own.height - 8;
    tip.style.left = `${Math.max(4, Math.min(left, width - own.width - 4))}px`;
    tip.style.top = `${above < 4 ? box.bottom + 8 : above}px`;
  };
  const hide = () => { tip.hidden = true; };
  for (const mark of document.querySelectorAll("svg.chart .value")) {
    const title = mark.querySelector("title");
    mark.dataset.value = title.textContent;
    title.remove();
    mark.setAttribute("tabindex", "-1");
    mark.addEventListener("pointerenter", () => show(mark));
    mark.addEventListener("pointerleave", hide);
    mark.addEventListener("focus", () => show(mark));
    mark.addEventListener("blur", hide);
  }
  for (const chart of document.querySelectorAll("svg.chart")) {
    if (!chart.querySelector(".value")) continue;
    chart.setAttribute("tabindex", "0"); // arrow keys walk through the values
    chart.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const marks = [...chart.querySelectorAll(".value")];
      const at = marks.indexOf(document.activeElement);
      marks[(at + step + marks.length) % marks.length].focus();
    });
  }
  addEventListener("scroll", hide, { passive: true });

  // Filters of long tables: rows that hold every typed word.
  for (const table of document.querySelectorAll(".scroll > table")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < LONG) continue;
    const line = document.createElement("p");
    line.className = "filter";
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = `Filter ${rows.length} rows`;
    field.setAttribute("aria-label", `Filter: ${table.parentElement.getAttribute("aria-label")}`);
    const left = document.createElement("span");
    left.className = "muted";
    left.setAttribute("role", "status");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every(word => text.includes(word));
        shown += !row.hidden;
      }
      left.textContent = words.length ? `${shown} of ${rows.length}` : "";
    });
    line.append(field, " ", left);
    table.parentElement.before(line);
  }
})();
