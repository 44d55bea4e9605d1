// Sections and the menu; the start; what happens when the theme or the width change.

/** Return the sections to show: of runs without a step, the overview and what they have. */
function shownSections() {
  const isEmpty = !runs().some(hasSteps);
  return SECTIONS.filter((one) => !isEmpty || !one.missing());
}

function build() {
  const sections = shownSections();
  fill(
    document.getElementById("sections"),
    sections.map((section) => {
      const reason = section.missing();
      const body = make("div", { class: "body" });
      const element = make(
        "section",
        { id: section.id, "aria-labelledby": `${section.id}-title` },
        make("h2", { id: `${section.id}-title`, tabindex: -1 }, section.title),
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
  const { name } = run();
  setText(document.querySelector("h1"), name);
  document.title = `${name} · moejax`;
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
  setText(document.getElementById("age"), `made ${clock(page.data.made_at)}`);
  document.documentElement.dataset.ready = "true";
}

start();
