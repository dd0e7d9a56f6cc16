// Runs before all else: where a part of the page does not come, the page is loaded anew, and at last says so.
(() => {
  const KEPT = "elastic-loads";
  const MOST = 5;
  const FIRST_WAIT_MS = 500;
  let failed = false;

  function anew() {
    if (failed) return;
    failed = true;
    const before = Number(sessionStorage.getItem(KEPT) ?? 0);
    if (before < MOST) {
      sessionStorage.setItem(KEPT, String(before + 1));
      setTimeout(() => location.reload(), FIRST_WAIT_MS * 2 ** before);
      return;
    }
    sessionStorage.removeItem(KEPT);
    const say = () => (document.getElementById("main").textContent = "A part of this page does not come from the server. Runs go on; load the page anew.");
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", say);
    else say();
  }
  // What does not come tells its own element alone.
  window.addEventListener("error", (event) => ["SCRIPT", "LINK"].includes(event.target?.tagName) && anew(), true);
  window.addEventListener("elastic-shown", () => sessionStorage.removeItem(KEPT));
})();
