/* Draws the timelines of the report. The wheel scrolls the page until a timeline is clicked. */
document.querySelectorAll(".timeline").forEach((element) => {
  freewheelGantt(element, JSON.parse(element.nextElementSibling.textContent));
  element.addEventListener("wheel", (event) => {
    if (!element.contains(document.activeElement)) event.stopPropagation();
  }, { capture: true });
});
