/* Lists of jobs and trajectories: choose all, ask before cancelling, open all. */
"use strict";

(() => {
  document.addEventListener("change", (event) => {
    if (!event.target.matches("[data-all]")) return;
    for (const box of event.target.form.querySelectorAll("input[name=job]")) box.checked = event.target.checked;
  });

  // A form with several buttons asks only for those that say so.
  document.addEventListener(
    "click",
    (event) => {
      const button = event.target.closest("[data-steer] button[name=action]");
      if (!button) return;
      const form = button.form;
      delete form.dataset.confirm;
      if (button.dataset.ask) Object.assign(form.dataset, { confirm: button.dataset.ask, verb: button.dataset.verb });
    },
    true,
  );

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-open-all]");
    if (!button) return;
    const parts = [...document.querySelectorAll("details.episode")];
    const open = parts.some((part) => !part.open);
    for (const part of parts) part.open = open;
    button.textContent = open ? "Close all" : "Open all";
  });
})();
