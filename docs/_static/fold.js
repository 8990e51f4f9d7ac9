
// Pages of the gallery: the code that draws a figure is folded, so that what it draws is read first.
document.addEventListener("DOMContentLoaded", () => {
  const draws = /\b(ax|axes|above|below|left|right|figure|fig)\.(plot|text|bar|barh|semilogy|annotate|set_\w+|set|axis|legend)\(/g;
  for (const block of document.querySelectorAll(".sphx-glr-example-title ~ * div.highlight-Python, section[id] div.highlight-Python")) {
    const code = block.textContent;
    const lines = code.trim().split("\n").length;
    if (block.closest("details") || lines < 14 || (code.match(draws) ?? []).length < 3) continue;
    const fold = document.createElement("details");
    const title = document.createElement("summary");
    title.textContent = `Code of the figure, ${lines} lines`;
    fold.className = "folded-code";
    block.before(fold);
    fold.append(title, block);
  }
});
