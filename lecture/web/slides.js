

// --- slides: one at a time; keys, a number with Enter, or a tap at the right or left edge --------------

const slides = [...document.querySelectorAll(".talk > section")];
let shown = 0, typed = "";

function go(i) {
  shown = Math.min(Math.max(i, 0), slides.length - 1);
  slides.forEach((slide, n) => slide.classList.toggle("shown", n === shown));
  history.replaceState(null, "", shown + 1 === SLIDE ? fragment() : `#${shown + 1}`);
}

const goToAddress = () => go((parseInt(location.hash.slice(1)) || 1) - 1);

addEventListener("keydown", event => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const keys = {ArrowRight: shown + 1, PageDown: shown + 1, ArrowLeft: shown - 1, PageUp: shown - 1, Home: 0, End: slides.length - 1};
  const next = event.key === "Enter" && typed ? typed - 1 : keys[event.key];
  typed = /^\d$/.test(event.key) ? typed + event.key : "";
  if (next === undefined && !typed) return;
  event.preventDefault();
  event.stopPropagation();                            // no control may use these keys
  if (next !== undefined) go(next);
}, true);
addEventListener("click", event => {
  if (event.target.closest("a, button, input, select, label, canvas, pre")) return;
  if (event.clientX > 0.95 * innerWidth) go(shown + 1);
  if (event.clientX < 0.05 * innerWidth) go(shown - 1);
});
addEventListener("hashchange", goToAddress);
goToAddress();
