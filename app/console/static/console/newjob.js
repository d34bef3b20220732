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

  /** What was said of the last try: a preflight tells anew what is wrong. */
  function clearErrors() {
    for (const told of form.querySelectorAll("#form-errors, .field-error")) told.remove();
    for (const field of form.querySelectorAll(".has-error")) field.classList.remove("has-error");
    for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  }

  /** The file choices of the chosen tenant; with a file, after it was uploaded. */
  async function bringFiles(file = null) {
    const choices = document.getElementById("file-choices");
    const tenant = form.elements.tenant.value;
    const url = new URL(form.dataset.files, location.href);
    const options = { headers: { "X-CSRF-Token": marlaas.csrf() } };
    if (file) {
      options.method = "POST";
      options.body = new FormData();
      options.body.set("tenant", tenant);
      options.body.set("file", file);
    } else {
      url.searchParams.set("tenant", tenant);
    }
    choices.setAttribute("aria-busy", "true");
    const answer = await fetch(url, options);
    choices.removeAttribute("aria-busy");
    if (answer.redirected) location.reload();
    else if (answer.ok) choices.innerHTML = await answer.text();
    else marlaas.toast(answer.status === 413 ? "The file is too large for the browser; use the API." : "That did not work.", "error");
    changed();
  }

  form.addEventListener("input", (event) => {
    if (event.target.closest("#equal")) return;
    changed();
    event.target.removeAttribute("aria-invalid");
  });
  form.addEventListener("change", (event) => {
    if (event.target.name === "tenant") bringFiles();
    if (event.target.matches("[data-upload]") && event.target.files.length) bringFiles(event.target.files[0]);
  });
  form.addEventListener("click", (event) => {
    if (event.target.closest("[data-preflight]")) clearErrors();
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
