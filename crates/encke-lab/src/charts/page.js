"use strict";
{
  const tip = document.getElementById("tip");
  const show = event => {
    const mark = event.target.closest("[data-tip]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    const room = innerWidth - tip.offsetWidth - 8;
    tip.style.left = Math.max(8, Math.min(event.clientX + 14, room)) + "px";
    tip.style.top = Math.max(8, event.clientY - tip.offsetHeight - 12) + "px";
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
}
