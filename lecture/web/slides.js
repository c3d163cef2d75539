// The page as a talk: one section a slide; arrow keys, page keys or a tap on the right or left edge.
(() => {
  const slides = [...document.querySelectorAll("main > section")];
  let now = Math.max(slides.findIndex(slide => "#" + slide.id === location.hash), 0);
  document.body.classList.add("slides");

  function show(i) {
    now = Math.min(Math.max(i, 0), slides.length - 1);
    slides.forEach((slide, n) => slide.classList.toggle("shown", n === now));
    history.replaceState(null, "", "#" + slides[now].id);
    scrollTo(0, 0);
  }
  addEventListener("keydown", event => {
    if (/^(INPUT|SELECT)$/.test(event.target.tagName)) return;         // the sliders keep their keys
    if (["ArrowRight", "PageDown"].includes(event.key)) show(now + 1);
    if (["ArrowLeft", "PageUp"].includes(event.key)) show(now - 1);
  });
  addEventListener("click", event => {
    if (event.target.closest("a, button, input, select, canvas, pre")) return;
    if (event.clientX > 0.9 * innerWidth) show(now + 1);
    if (event.clientX < 0.1 * innerWidth) show(now - 1);
  });
  addEventListener("hashchange", () => show(slides.findIndex(slide => "#" + slide.id === location.hash)));
  show(now);
})();
