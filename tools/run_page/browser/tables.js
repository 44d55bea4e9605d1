// Tables: bytes by collective, and the configuration with a search.

/** Add a table of the bytes that a device sends in a step, under each layout. */
function addBytes(body) {
  if (!run.bytes.length) return;
  const names = [...new Set(run.bytes.flatMap((one) => Object.keys(one.by)))];
  const head = ["collective", ...run.bytes.map((one) => `from step ${one.step}`)];
  const rows = names.map((name) => [
    name,
    ...run.bytes.map(({ by }) =>
      Object.hasOwn(by, name) ? bytesText(by[name]) : null,
    ),
  ]);
  body.append(
    make("h3", {}, "Bytes that a device sends in a step, modelled"),
    makeScrollBox("Bytes by collective", makeTable("Bytes by collective", head, rows)),
  );
}

/** Add a table of the configuration, and a field that searches in it. */
function configuration(body) {
  const shown = makeScrollBox("Configuration");
  const text = make("input", { type: "search", oninput: () => show() });
  const show = () => {
    const wanted = text.value.toLowerCase();
    const rows = run.config.filter((pair) =>
      pair.some((one) => one.toLowerCase().includes(wanted)),
    );
    const attributes = { class: "config" };
    fill(shown, makeTable("Configuration", ["field", "value"], rows, attributes));
  };
  body.append(make("div", { class: "controls" }, labelled("Search", text)), shown);
  show();
}
