"use strict";
// Sorts tables by their columns and filters chapters and rows. The page is complete without it:
// rows are there in the order of their ranks, and all controls are made here.

const boards = [...document.querySelectorAll("main section")].filter(
  (section) => Object.keys(section.dataset).length > 0);
const rowsOf = (root) => [...root.querySelectorAll("table.sortable tbody tr")];

// -- sorting

function compare(one, other) {
  const numbers = [Number(one), Number(other)];
  if (!numbers.some(Number.isNaN)) return numbers[0] - numbers[1];
  return one.localeCompare(other, "en", { numeric: true });
}

function sortBy(table, header, number) {
  const isNumber = header.classList.contains("num") && number > 0;
  const first = isNumber ? "descending" : "ascending";
  const second = isNumber ? "ascending" : "descending";
  const order = header.getAttribute("aria-sort") === first ? second : first;
  for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  const value = (row) => row.cells[number].dataset.value;
  const filled = [...body.rows].filter((row) => value(row) !== "");
  const empty = [...body.rows].filter((row) => value(row) === ""); // last in both orders
  filled.sort((one, other) => sign * compare(value(one), value(other)));
  body.append(...filled, ...empty);
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((header, number) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sortBy(table, header, number));
    header.append(button);
  });
}

// -- filters

const controls = document.createElement("form");
controls.className = "filters card";
controls.setAttribute("aria-label", "Filters");
controls.addEventListener("submit", (event) => event.preventDefault());

function labelled(text, control) {
  const label = document.createElement("label");
  label.append(text, control);
  controls.append(label);
  return control;
}

const search = document.createElement("input");
search.type = "search";
search.autocomplete = "off";
labelled("Model or text", search);

const chosen = {};
for (const name of new Set(boards.flatMap((section) => Object.keys(section.dataset)))) {
  const values = [...new Set(boards.map((section) => section.dataset[name]))];
  if (values.length < 2) continue;
  const select = document.createElement("select");
  select.name = name;
  select.add(new Option("all", ""));
  for (const value of values.sort()) select.add(new Option(value, value));
  chosen[name] = labelled(name[0].toUpperCase() + name.slice(1), select);
}

const alarms = document.querySelector("td .flag.alarming");
const reliable = document.createElement("input");
reliable.type = "checkbox";
reliable.name = "reliable";
if (alarms) {
  const label = document.createElement("label");
  label.className = "tick";
  label.append(reliable, "hide suspect results");
  controls.append(label);
}

const status = document.createElement("output");
controls.append(status);

function isShown(row, words) {
  const text = row.textContent.toLowerCase();
  if (reliable.checked && row.querySelector(".flag.alarming")) return false;
  return words.every((word) => text.includes(word));
}

function apply() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  let every = 0;
  for (const section of boards) {
    const fits = Object.entries(chosen).every(
      ([name, select]) => select.value === "" || section.dataset[name] === select.value);
    let found = 0;
    for (const row of rowsOf(section)) {
      row.hidden = !isShown(row, words);
      every += 1;
      if (!row.hidden) found += 1;
    }
    for (const scroll of section.querySelectorAll(".scroll")) {
      const isEmpty = rowsOf(scroll).every((row) => row.hidden);
      const [above, below] = [scroll.previousElementSibling, scroll.nextElementSibling];
      for (const part of [scroll, below]) part.hidden = isEmpty;
      if (above.tagName === "H3") above.hidden = isEmpty;
    }
    section.hidden = !fits || found === 0;
    shown += section.hidden ? 0 : found;
    const link = document.querySelector(`nav a[href="#${section.id}"]`);
    if (link) link.hidden = section.hidden;
  }
  status.textContent = shown === every ? `${every} results` : `${shown} of ${every} results`;
}

controls.addEventListener("input", apply);
controls.addEventListener("change", apply);
const first = boards[0];
if (first) first.before(controls);
apply();
