// Light or dark, before the page is drawn: the operator's choice, else the system's.
(() => {
  const KEY = "marlaas-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const preferred = () => (system.matches ? "dark" : "light");

  function apply() {
    root.dataset.theme = localStorage.getItem(KEY) ?? preferred();
    document.dispatchEvent(new CustomEvent("marlaas:theme"));
  }

  apply();
  system.addEventListener("change", apply);
  addEventListener("storage", apply);

  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-toggle]")) return;
    const chosen = root.dataset.theme === "dark" ? "light" : "dark";
    if (chosen === preferred()) localStorage.removeItem(KEY); // follows the system again
    else localStorage.setItem(KEY, chosen);
    apply();
  });
})();
