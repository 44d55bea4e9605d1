// What an exchange of rows left out or did twice, and the bytes that it sends.

/** Add a curve of dropped rows and of steps that ran again, where there were any. */
function addShares(body) {
  const series = [
    ["dropped_share", "dropped choices"],
    ["redone", "steps that ran again"],
  ]
    .filter(([name]) => runs().some((of) => isEverAbove0(of, name)))
    .map(([curve, label]) => ({ curve, label }));
  if (!series.length) {
    body.append(
      make("p", { class: "hint" }, "Nothing was dropped, and no step ran again."),
    );
    return;
  }
  addCurves(body, {
    id: "drops",
    title: "Dropped and redone",
    unit: "shares",
    height: 220,
    fromZero: true,
    series,
  });
}

/** Return text in lines of at most `width` letters; a longer word is cut. */
function inLines(text, width) {
  const lines = [];
  for (const word of text.split(" ")) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && longer.length <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.map((line) => plain(line, width)).join("<br>");
}

/** Add bars of the bytes that a device sends in a step, under the last layout. */
function addBytes(body) {
  const last = () => run().bytes?.at(-1);
  const sorted = () => Object.entries(last().by).sort((a, b) => a[1] - b[1]);
  if (!last() || !sorted().length) return;
  addFigure(body, {
    id: "bytes",
    title: "Bytes that a device sends in a step",
    unit: "by collective, modelled",
    height: () => 90 + (isNarrow() ? 44 : 30) * sorted().length,
    describe: () =>
      sorted()
        .reverse()
        .map(([name, bytes]) => `${name}: ${bytesText(bytes)}.`)
        .join(" "),
    caption: () =>
      run().bytes.length > 1
        ? `Under the layout since step ${last().step}; the table has all ${run().bytes.length} layouts.`
        : "",
    draw: () => ({
      traces: [
        {
          type: "bar",
          orientation: "h",
          y: sorted().map((_, i) => i),
          x: sorted().map(([, bytes]) => bytes),
          text: sorted().map(([, bytes]) => bytesText(bytes)),
          textposition: "auto",
          marker: { color: lineColor(0) },
          hoverinfo: "skip",
          cliponaxis: false,
        },
      ],
      layout: baseLayout({
        xTitle: "bytes",
        hovermode: false,
        bargap: 0.3,
        xaxis: { tickformat: "~s" },
        yaxis: {
          showgrid: false,
          automargin: true,
          tickmode: "array",
          tickvals: sorted().map((_, i) => i),
          ticktext: sorted().map(([name]) => inLines(name, isNarrow() ? 16 : 34)),
        },
      }),
    }),
    table: () => {
      const names = [...new Set(run().bytes.flatMap((one) => Object.keys(one.by)))];
      return {
        head: ["collective", ...run().bytes.map((one) => `from step ${one.step}`)],
        rows: names.map((name) => [
          name,
          ...run().bytes.map((one) =>
            one.by[name] === undefined ? null : bytesText(one.by[name]),
          ),
        ]),
      };
    },
  });
}
