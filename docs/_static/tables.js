// Long tables: a box that filters their rows, a head and a first column that stay in sight (site.css).
// Qwen3-VL is qwen3_vl, and Phi-3.5 is in the row of phi3: names are compared without what stands between their letters.
const plain = (text) => text.toLowerCase().replace(/[-_.]/g, "");

document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table")) {
    const rows = [...table.tBodies[0]?.rows ?? []];
    if (rows.length < 25) continue;
    const wrapper = table.closest(".table-wrapper") ?? table.parentElement;
    wrapper.classList.add("long-table");

    const box = document.createElement("input");
    box.type = "search";
    box.placeholder = `Filter ${rows.length} rows: llama, ✗, DynamicCache ...`;
    box.setAttribute("aria-label", "Filter the rows of the table below");
    box.className = "table-filter";
    box.addEventListener("input", () => {
      const words = plain(box.value).split(/\s+/).filter(Boolean);
      for (const row of rows) {
        const text = plain(row.textContent);
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    wrapper.before(box);
  }
});
