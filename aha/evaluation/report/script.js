"use strict";
const root = document.documentElement;
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

const differences = document.getElementById("differences");
differences.addEventListener("click", () => {
  const on = differences.getAttribute("aria-pressed") !== "true";
  differences.setAttribute("aria-pressed", on);
  document.querySelector("table").classList.toggle("differences", on);
});

// An explainer switched off disappears from figures and pictures, not from the table.
all(".chip").forEach((chip) => chip.addEventListener("click", () => {
  const on = chip.getAttribute("aria-pressed") !== "true";
  chip.setAttribute("aria-pressed", on);
  all(`[data-explainer="${chip.dataset.explainer}"]:not(.chip)`).forEach((e) => e.classList.toggle("off", !on));
}));

const bar = document.querySelector(".chips");
new ResizeObserver(() => root.style.setProperty("--bar", `${bar.offsetHeight}px`)).observe(bar);

const strength = document.getElementById("strength");
if (strength) {
  const show = () => {
    root.style.setProperty("--strength", strength.value / 100);
    strength.nextElementSibling.value = `${strength.value} %`;
  };
  strength.addEventListener("input", show);
  show();

  const dialog = document.getElementById("large");
  const hold = dialog.querySelector(".hold");
  let cells = [], at = 0;
  const enlarge = (index) => {
    at = (index + cells.length) % cells.length;
    const copy = cells[at].cloneNode(true);
    const frame = document.createElement("div");
    frame.className = "stack";
    frame.append(...copy.querySelector(".stack").childNodes);
    copy.querySelector(".stack").replaceWith(frame);
    hold.style.cssText = cells[at].closest("article").style.cssText;
    hold.replaceChildren(copy);
  };
  all("button.stack").forEach((button) => button.addEventListener("click", () => {
    cells = all(".cell[data-explainer]:not(.off)", button.closest("article"));
    enlarge(cells.indexOf(button.parentElement));
    dialog.showModal();
  }));
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowRight") enlarge(at + 1);
    if (event.key === "ArrowLeft") enlarge(at - 1);
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}
