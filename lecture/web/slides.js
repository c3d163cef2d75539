

// --- slides: one at a time; arrow keys, page keys, or a tap at the right or left edge ---------------

const slides = [...document.querySelectorAll(".talk > section")];
const fromLink = () => slides.findIndex(slide => "#" + slide.id === location.hash.split("&")[0]);
let shown = Math.max(fromLink(), 0);

function go(i) {
  shown = Math.min(Math.max(i, 0), slides.length - 1);
  slides.forEach((slide, n) => slide.classList.toggle("shown", n === shown));
  history.replaceState(null, "", slides[shown].id === "try" ? fragment() : "#" + slides[shown].id);
}
addEventListener("keydown", event => {
  if (/^(INPUT|SELECT)$/.test(event.target.tagName)) return;          // sliders keep their keys
  if (["ArrowRight", "PageDown"].includes(event.key)) go(shown + 1);
  if (["ArrowLeft", "PageUp"].includes(event.key)) go(shown - 1);
});
addEventListener("click", event => {
  if (event.target.closest("a, button, input, select, label, canvas, pre")) return;
  if (event.clientX > 0.95 * innerWidth) go(shown + 1);
  if (event.clientX < 0.05 * innerWidth) go(shown - 1);
});
addEventListener("hashchange", () => { if (fromLink() >= 0) go(fromLink()); });
go(shown);
