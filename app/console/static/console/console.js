// What every page has: menu, messages, confirmations, copy buttons, polling that rests while nobody looks.
const marlaas = (() => {
  const csrf = () => document.querySelector("meta[name=csrf-token]").content;

  /** The colour that a CSS variable has in the present theme, for drawing on a canvas. */
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /** Calls `draw` whenever the theme changes. */
  const onTheme = (draw) => document.addEventListener("marlaas:theme", draw);

  /** Runs `refresh` now and every `seconds`, one at a time, while the page is visible and `element` is in it. */
  function poll(element, refresh, seconds = 2) {
    let busy = false;
    const tick = async () => {
      if (!element.isConnected) return stop();
      if (document.hidden || busy) return;
      busy = true;
      try {
        await refresh();
      } finally {
        busy = false;
      }
    };
    const timer = setInterval(tick, seconds * 1000);
    const stop = () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", tick);
    };
    document.addEventListener("visibilitychange", tick);
    tick();
    return stop;
  }

  /** Fetches JSON; a session that has ended leads to the login page. Throws on any other failure. */
  async function json(url, options = {}) {
    const headers = { Accept: "application/json", ...options.headers };
    if (options.method && options.method !== "GET") headers["X-CSRF-Token"] = csrf();
    const response = await fetch(url, { ...options, headers });
    if (response.status === 401) location.reload();
    if (!response.ok) throw new Error(`${url}: ${response.status}`);
    return response.json();
  }

  /** Shows a message over the page. `kind`: info, success or error. */
  function toast(text, kind = "info") {
    const box = document.createElement("div");
    box.className = `toast toast-${kind}`;
    box.textContent = text;
    document.getElementById("toasts").append(box);
    arm(box);
  }

  function arm(box) {
    const close = document.createElement("button");
    close.type = "button";
    close.className = "icon-button";
    close.setAttribute("aria-label", "Dismiss");
    close.textContent = "×";
    close.addEventListener("click", () => box.remove());
    box.append(close);
    if (!box.classList.contains("toast-error")) setTimeout(() => box.remove(), 6000);
  }

  /** Asks in the page's dialog; resolves to whether it was confirmed. */
  function ask(text, verb = "Confirm") {
    const dialog = document.getElementById("confirm");
    dialog.querySelector("p").textContent = text;
    dialog.querySelector("[value=yes]").textContent = verb;
    dialog.returnValue = "";
    dialog.showModal();
    return new Promise((resolve) =>
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }),
    );
  }

  return { csrf, color, onTheme, poll, json, toast, ask, arm };
})();

document.querySelectorAll(".toast").forEach(marlaas.arm);

// Where tabs are wider than the window, the present one is in sight.
// (scrollIntoView would begin the order of Tab there.)
for (const tab of document.querySelectorAll(".tabs [aria-current]")) {
  const tabs = tab.closest(".tabs");
  tabs.scrollLeft = tab.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - tab.offsetWidth) / 2;
}

// --- the menu of narrow windows
const menu = document.querySelector("[data-menu]");
menu?.addEventListener("click", () => {
  const open = document.body.classList.toggle("menu-open");
  menu.setAttribute("aria-expanded", String(open));
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !document.body.classList.contains("menu-open")) return;
  menu.click();
  menu.focus();
});

// --- links that look like buttons act like them: the space bar follows them too
document.addEventListener("keydown", (event) => {
  if (event.key !== " " || !event.target.matches("a[role=button]")) return;
  event.preventDefault();
  event.target.click();
});

// --- <form data-confirm="Really?" data-verb="Delete">: asks before it is sent
document.addEventListener(
  "submit",
  async (event) => {
    const form = event.target;
    if (!form.dataset.confirm || form.dataset.confirmed) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (!(await marlaas.ask(form.dataset.confirm, form.dataset.verb))) return;
    form.dataset.confirmed = "yes";
    form.requestSubmit(event.submitter);
    delete form.dataset.confirmed;
  },
  true,
);

// --- <button data-copy="#id">: copies the text of an element
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(document.querySelector(button.dataset.copy).textContent.trim());
  marlaas.toast("Copied", "success");
});

// --- <select data-submit>: a filter acts as it is changed
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
});

// --- htmx: the token goes with every request; what polls rests while the page is hidden
document.addEventListener("htmx:config:request", (event) => {
  const { ctx } = event.detail;
  ctx.request.headers["X-CSRF-Token"] = marlaas.csrf();
  if (document.hidden && ctx.sourceElement?.matches("[data-poll]")) event.preventDefault();
});
document.addEventListener("htmx:confirm", (event) => {
  event.preventDefault();
  const { ctx, issueRequest, dropRequest } = event.detail;
  marlaas.ask(ctx.confirm, ctx.sourceElement.dataset.verb).then((yes) => (yes ? issueRequest() : dropRequest()));
});
document.addEventListener("marlaas:toast", (event) => marlaas.toast(event.detail.text, event.detail.kind));
