/* The form of a new job: the equal API call follows the form, presets fill fields, a tenant brings its files. */
"use strict";

(() => {
  const form = document.getElementById("new-job");
  if (!form) return;
  const WAIT_MS = 350;
  let timer = null;

  /** Asks for the equal call anew, once typing rests. */
  function changed() {
    clearTimeout(timer);
    timer = setTimeout(() => form.dispatchEvent(new CustomEvent("marlaas:changed")), WAIT_MS);
  }

  async function bringFiles(tenant) {
    const url = new URL(form.dataset.files, location.href);
    url.searchParams.set("tenant", tenant);
    const answer = await fetch(url);
    if (answer.redirected) location.reload();
    if (answer.ok) document.getElementById("file-choices").innerHTML = await answer.text();
    changed();
  }

  form.addEventListener("input", (event) => {
    if (event.target.closest("#equal")) return;
    changed();
    event.target.removeAttribute("aria-invalid");
  });
  form.addEventListener("change", (event) => {
    if (event.target.name === "tenant") bringFiles(event.target.value);
  });
  form.addEventListener("click", (event) => {
    const preset = event.target.closest("[data-fill]");
    if (!preset) return;
    const field = document.getElementById(preset.dataset.fill);
    field.value = preset.dataset.text;
    field.focus();
    changed();
  });

  // Which of the snippets are open stays as it is when they are brought anew.
  const open = new Map();
  document.addEventListener(
    "toggle",
    (event) => event.target.matches?.("[data-keep]") && open.set(event.target.id, event.target.open),
    true,
  );
  document.addEventListener("htmx:after:swap", () => {
    for (const [id, was] of open) {
      const part = document.getElementById(id);
      if (part) part.open = was;
    }
  });

  document.getElementById("form-errors")?.focus();
})();
