// The configurations of the runs, as a table that can be searched.

const search = { text: "", onlyDifferences: false };

function configuration(body) {
  const shown = makeScrollBox("Configuration");
  const count = make("p", { class: "hint", role: "status" });
  const text = make("input", {
    type: "search",
    value: search.text,
    oninput: () => {
      search.text = text.value;
      view.update();
    },
  });
  const only = make("input", {
    type: "checkbox",
    onchange: () => {
      search.onlyDifferences = only.checked;
      view.update();
    },
  });
  only.checked = search.onlyDifferences;
  const view = {
    update() {
      const rows = configRows().filter(
        ({ name, values, differs }) =>
          (!search.onlyDifferences || differs || runs().length === 1) &&
          [name, ...values].some((one) =>
            String(one ?? "")
              .toLowerCase()
              .includes(search.text.toLowerCase()),
          ),
      );
      setText(count, `${plural(rows.length, "field")} shown.`);
      const head = [
        "field",
        ...(runs().length > 1 ? runs().map((of) => of.name) : ["value"]),
      ];
      const table = makeTable(
        "Configuration",
        head,
        rows.map(({ name, values }) => [name, ...values]),
        { class: "config stack" },
      );
      rows.forEach(({ differs }, i) =>
        table.tBodies[0].rows[i].classList.toggle("differs", differs),
      );
      fillIfNew(shown, table);
    },
  };
  body.append(
    make(
      "div",
      { class: "controls" },
      labelled("Search", text),
      runs().length > 1
        ? make("label", { class: "check" }, only, make("span", {}, "differences alone"))
        : null,
      count,
    ),
    shown,
  );
  view.update();
  page.views.push(view);
}

/** Return the fields of all runs, by name, with the value of each run. */
function configRows() {
  const tables = runs().map(
    (of) => new Map(of.config.map(([name, value]) => [name, String(value)])),
  );
  const names = [...new Set(tables.flatMap((table) => [...table.keys()]))].sort();
  return names.map((name) => {
    const values = tables.map((table) => table.get(name) ?? null);
    return { name, values, differs: new Set(values).size > 1 };
  });
}
