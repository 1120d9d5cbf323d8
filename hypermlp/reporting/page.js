// Shows the data-tip of the element under the pointer, or of the one with keyboard focus.
const tip = document.getElementById("tip");
function show(target, x, y) {
  const owner = target.closest && target.closest("[data-tip]");
  tip.hidden = !owner;
  if (!owner) return;
  tip.textContent = owner.dataset.tip;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - width - 4)) + "px";
  tip.style.top = (y + height + 20 > innerHeight ? y - height - 12 : y + 14) + "px";
}
document.addEventListener("pointermove", event => show(event.target, event.clientX, event.clientY));
document.addEventListener("pointerdown", event => show(event.target, event.clientX, event.clientY));
document.addEventListener("focusin", event => {
  const box = event.target.getBoundingClientRect();
  show(event.target, box.left, box.bottom);
});
