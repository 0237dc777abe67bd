// Runs before the first paint, so that a chosen theme never flashes the other one.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem('surefoot-theme'); } catch { /* storage is switched off */ }
  if (chosen === 'light' || chosen === 'dark') document.documentElement.dataset.theme = chosen;
})();
