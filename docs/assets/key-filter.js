// A search field above the tables of the keys page. It hides rows and sections without the words. The class
// "keys" gives the tables the column widths of site.css.
document$.subscribe(() => {
  const title = document.querySelector("article h1");
  if (!title || !location.pathname.endsWith("/reference/keys.html")) return;

  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Filter keys: margin, amax, checkpoint ...";
  field.setAttribute("aria-label", "Filter keys");
  field.className = "key-filter";
  title.after(field);
  title.closest("article").classList.add("keys");

  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll("article tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    for (const table of document.querySelectorAll("article table")) {
      const isEmpty = !table.querySelector("tbody tr:not([hidden])");
      hideSection(table, isEmpty);
    }
  });
});

// A section is its heading and everything up to the table.
function hideSection(table, isHidden) {
  let element = table.closest(".md-typeset__scrollwrap") || table;
  element.hidden = isHidden;
  while ((element = element.previousElementSibling)) {
    element.hidden = isHidden;
    if (element.tagName === "H2") break;
  }
}
