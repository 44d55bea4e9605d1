// Sections and the menu; the start; what happens when data, the run or the theme change.

/** Format of the data that this page reads. */
const FORMAT = 1;

/** Return the sections to show: of runs without a step, the overview and what they have. */
function shownSections() {
  const isEmpty = !runs().some(hasSteps);
  return SECTIONS.filter((one) => !isEmpty || !one.missing());
}

/** Return what decides which figures there are. If it changes, the page is built anew. */
function outline() {
  return JSON.stringify([
    page.chosen,
    runs().map((of) => [
      of.name,
      hasSteps(of),
      Object.keys(of.curves ?? {}).filter((name) => hasCurve(of, name)),
      Object.keys(of.layer_curves ?? {}),
      ["skipped", "redone", "dropped_share", "dead_experts"].map((name) =>
        isEverAbove0(of, name),
      ),
      Boolean(of.goodput?.step?.length),
      Boolean(of.load),
      Boolean(of.parts_msec?.step.length),
      (of.plans ?? []).length > 0,
      (of.decisions ?? []).length > 0,
      adoptions(of).filter((one) => Number.isFinite(one.gain_msec_measured)).length > 1,
      (of.bytes ?? []).length > 0,
      of.config.length > 0,
    ]),
  ]);
}

function build() {
  page.outline = outline();
  page.views = [];
  document.querySelectorAll(".plot").forEach((plot) => {
    watcher.unobserve(plot);
    Plotly.purge(plot);
  });
  const sections = shownSections();
  fill(
    document.getElementById("sections"),
    sections.map((section) => {
      const reason = section.missing();
      const body = make("div", { class: "body" });
      const name =
        section.ofOneRun && runs().length > 1
          ? make("span", { class: "unit" }, ` ${run().name}`)
          : null;
      const element = make(
        "section",
        { id: section.id, "aria-labelledby": `${section.id}-title` },
        make("h2", { id: `${section.id}-title`, tabindex: -1 }, section.title, name),
        make("p", { class: reason ? "missing" : "hint" }, reason || section.hint),
        body,
      );
      if (!reason) section.build(body);
      return element;
    }),
  );
  fill(
    document.getElementById("menu-list"),
    sections.map((section) =>
      make(
        "li",
        {},
        make(
          "a",
          { href: `#${section.id}`, class: section.missing() ? "without" : null },
          section.title,
        ),
      ),
    ),
  );
  chooser();
  heading();
}

/** Show a list of the runs, where there are several. */
function chooser() {
  const place = document.getElementById("chooser");
  if (runs().length < 2) {
    fill(place);
    return;
  }
  const select = makeSelect(
    runs().map((of, index) => [String(index), of.name]),
    String(page.chosen),
    (value) => {
      page.chosen = Number(value);
      [slider.follows, layerStep.index, filter.limit] = [true, null, MAX_DECISIONS];
      build();
      document.querySelector("#chooser select").focus();
    },
  );
  fill(place, labelled("Run in detail", select));
}

function heading() {
  const names = runs().map((of) => of.name);
  const text = names.length === 1 ? names[0] : `${names.length} runs`;
  setText(document.querySelector("h1"), text);
  document.title = `${text} · moejax`;
}

/** Show new data: figures change in place, and keep zooms and sliders. */
function takeData(data) {
  if (data.format !== FORMAT) {
    announce(
      `The data has format ${data.format}, and this page reads ${FORMAT}: load the page again.`,
    );
    return;
  }
  const before = runs().map((of) => of.state);
  page.data = data;
  page.chosen = Math.min(page.chosen, data.runs.length - 1);
  if (outline() !== page.outline) build();
  else refresh();
  runs().forEach((of, index) => {
    if (before[index] !== of.state) announce(`${of.name}: ${of.state}.`);
  });
}

function refresh() {
  for (const view of page.views) view.update();
}

/** Take the colours that were chosen last, if the browser keeps them, and follow the
    choice, or the system where it is the choice. */
function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let choice = "system";
  try {
    choice = localStorage.getItem("moejax-theme") ?? "system";
  } catch {
    // This browser keeps nothing.
  }
  if (!["system", "light", "dark"].includes(choice)) choice = "system";
  const apply = () => {
    const ofSystem = system.matches ? "dark" : "light";
    document.documentElement.dataset.theme = choice === "system" ? ofSystem : choice;
    refresh();
  };
  const options = [
    ["system", "as the system"],
    ["light", "light"],
    ["dark", "dark"],
  ];
  const select = makeSelect(options, choice, (value) => {
    choice = value;
    apply();
    try {
      localStorage.setItem("moejax-theme", value);
    } catch {
      // It is kept for this visit alone.
    }
  });
  fill(document.getElementById("theme"), labelled("Colours", select));
  system.addEventListener("change", apply);
  apply();
}

/** Draw anew when the window becomes narrow or wide. */
function followWidth() {
  let narrow = isNarrow();
  window.addEventListener("resize", () => {
    if (narrow === isNarrow()) return;
    narrow = isNarrow();
    refresh();
  });
}

function start() {
  page.data = JSON.parse(document.getElementById("data").textContent);
  startTheme();
  followWidth();
  build();
  startLive();
  document.documentElement.dataset.ready = "true";
}

start();
