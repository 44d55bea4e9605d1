// The sections of the page: what each says, what it shows, and what it lacks.

/** Return whether the run has none of these curves. */
const lacks = (...names) => !names.some(hasCurve);

const addHint = (body, text) => body.append(make("p", { class: "hint" }, text));

/** The sections in order. `missing`, where it is not empty, says why there is nothing to
    show and how to get it. */
const SECTIONS = [
  {
    id: "overview",
    title: "Overview",
    hint: "Good: high goodput, and device max/mean near 1.",
    missing: "",
    build: overview,
  },
  {
    id: "loss",
    title: "Loss",
    hint:
      "How well the model predicts the next token. Good: it falls, and the " +
      "held-out points stay close to the curve.",
    missing: lacks("loss") ? "No loss was recorded: let the run do a step." : "",
    build: (body) => {
      addCurves(body, {
        id: "loss-curve",
        title: "Loss",
        unit: "nats per token",
        height: 340,
        smooth: true,
        heldOut: true,
        series: { loss: "training" },
      });
      addCurves(body, {
        id: "grad-norm",
        title: "Gradient norm",
        unit: "before clipping",
        height: 200,
        smooth: true,
        clip: true,
        series: { grad_norm: "gradient norm" },
      });
      addCurves(body, {
        id: "lr",
        title: "Learning rate",
        height: 180,
        fromZero: true,
        series: { lr: "learning rate" },
      });
      if (curve("skipped").some((share) => share > 0)) {
        addCurves(body, {
          id: "skipped",
          title: "Skipped updates",
          unit: "share of steps",
          height: 180,
          fromZero: true,
          series: { skipped: "skipped" },
        });
      }
    },
  },
  {
    id: "speed",
    title: "Speed",
    hint: "How fast steps are. Good: flat, and high for tokens and MFU.",
    missing: lacks("tok_per_sec", "step_msec")
      ? "No times were recorded: let the run do a step."
      : "",
    build: (body) => {
      const options = { smooth: true, clip: true, marks: true };
      addCurves(body, {
        id: "tok-per-sec",
        title: "Tokens per second",
        unit: "all devices",
        series: { tok_per_sec: "tokens per second" },
        ...options,
      });
      addCurves(body, {
        id: "step-msec",
        title: "Time of a step",
        unit: "ms",
        series: { step_msec: "ms a step" },
        ...options,
      });
      if (lacks("mfu")) addHint(body, "No MFU: no peak FLOPs are known for this device.");
      addCurves(body, {
        id: "mfu",
        title: "MFU",
        unit: "share of peak FLOPs",
        series: { mfu: "MFU" },
        ...options,
      });
    },
  },
  {
    id: "goodput",
    title: "Where the time went",
    hint:
      "Shares of the wall time of process 0. Good: nearly all " +
      "of it is useful, that is, in steps whose result was kept.",
    missing: run.goodput ? "" : "No goodput.jsonl: train/main.py writes it as it runs.",
    build: addGoodput,
  },
  {
    id: "load",
    title: "Load",
    hint:
      "How evenly tokens are spread over experts (the router's " +
      "work) and over devices (the balancer's). Good: device max/mean near 1.",
    missing:
      loads || !lacks("device_max_over_mean", "expert_max_over_mean")
        ? ""
        : "No loads were recorded: set Train.log_load_every_steps, and let the run get that far.",
    build: (body) => {
      if (loads) loadMap(body);
      else
        addHint(body, "No table of experts: Train.log_load_every_steps records one.");
      addCurves(body, {
        id: "device-ratio",
        title: "Device max/mean",
        unit: "worst layer; 1 is even",
        marks: true,
        series: {
          device_max_over_mean: "plan in use",
          home_device_max_over_mean: "home plan",
        },
      });
      if (deviceRows) deviceMap(body);
      addLayerMap(body, "device_max_over_mean");
      addCurves(body, {
        id: "expert-ratio",
        title: "Expert max/mean",
        unit: "worst layer; 1 is even",
        height: 220,
        series: { expert_max_over_mean: "expert max/mean" },
      });
      addLayerMap(body, "expert_max_over_mean");
    },
  },
  {
    id: "layer",
    title: "One layer",
    hint:
      "Which device holds which experts, and how full it is, " +
      "before and after a change of the plan. Good: all bars end at the mark of the mean.",
    missing: plans.length ? "" : "No plans.jsonl: train/main.py writes it as it runs.",
    build: oneLayer,
  },
  {
    id: "decisions",
    title: "Decisions",
    hint:
      "What the balancer weighed, what it expected to save " +
      "and to pay, and what came of it. Good: measured gains near the predicted ones.",
    missing: run.decisions.length
      ? ""
      : "No decisions: Balance.policy = 'home', or the load was even so far.",
    build: decisionSection,
  },
  {
    id: "exchange",
    title: "Exchange",
    hint: "How rows travel between devices. Good: one round, nothing dropped.",
    missing:
      lacks("rounds", "fullest_pair", "dropped_share") && !run.bytes.length
        ? "No figures of exchanges were recorded: let the run do a step."
        : "",
    build: (body) => {
      addCurves(body, {
        id: "rounds",
        title: "Rounds",
        unit: "worst layer",
        height: 200,
        fromZero: true,
        marks: true,
        series: { rounds: "rounds" },
      });
      addCurves(body, {
        id: "fullest",
        title: "Fullest pair of devices",
        unit: "rows, worst layer",
        height: 220,
        fromZero: true,
        marks: true,
        series: { fullest_pair: "fullest pair" },
      });
      if (["dropped_share", "redone"].some((name) => curve(name).some((x) => x > 0))) {
        addCurves(body, {
          id: "drops",
          title: "Dropped and redone",
          unit: "shares",
          height: 220,
          fromZero: true,
          series: { dropped_share: "dropped choices", redone: "steps that ran again" },
        });
      } else addHint(body, "Nothing was dropped, and no step ran again.");
      addBytes(body);
    },
  },
  {
    id: "routers",
    title: "Routers",
    hint:
      "How the routers choose. Good: entropy that falls " +
      "slowly and no dead experts, which get no token at all.",
    missing: lacks("router_entropy", "dead_experts")
      ? "No figures of routers: let the run do a step."
      : "",
    build: (body) => {
      addCurves(body, {
        id: "entropy",
        title: "Entropy of a token's choice",
        unit: "nats, mean of layers",
        smooth: true,
        height: 220,
        series: { router_entropy: "entropy" },
      });
      addLayerMap(body, "router_entropy");
      addCurves(body, {
        id: "dead",
        title: "Dead experts",
        unit: "in all layers",
        fromZero: true,
        height: 200,
        series: { dead_experts: "dead experts" },
      });
    },
  },
  {
    id: "model",
    title: "The model's prediction",
    hint:
      "What the cost model expects of a step beside what the clock " +
      "said. Good: both jump at the same steps; a constant gap does no harm.",
    missing: lacks("modelled_step_msec")
      ? "No modelled times were recorded: let the run do a step."
      : "",
    build: prediction,
  },
  {
    id: "memory",
    title: "Memory",
    hint: "Memory in use. Good: flat after the first steps.",
    missing: lacks("host_memory_gib", "device_memory_gib")
      ? "No memory was recorded: let the run do a step."
      : "",
    build: (body) => {
      if (lacks("device_memory_gib")) {
        addHint(body, "No figures of devices: this back end does not count their memory.");
      }
      addCurves(body, {
        id: "device-memory",
        title: "Fullest device",
        unit: "GiB",
        fromZero: true,
        height: 220,
        series: { device_memory_gib: "in use", peak_device_memory_gib: "peak" },
      });
      addCurves(body, {
        id: "host-memory",
        title: "Process 0 on its host",
        unit: "GiB resident",
        fromZero: true,
        height: 220,
        series: { host_memory_gib: "resident" },
      });
    },
  },
  {
    id: "configuration",
    title: "Configuration",
    hint: "Every field of the configuration, as the run resolved it.",
    missing: run.config.length ? "" : "No config.gin in the run directory.",
    build: configuration,
  },
];

/** Show the sections and the menu. A run without a step has the sections with content
    alone. */
function build() {
  const sections = SECTIONS.filter((one) => run.step || !one.missing);
  const main = document.getElementById("sections");
  const menu = document.getElementById("menu");
  fill(main);
  for (const { id, title, hint, missing, build: addContent } of sections) {
    const body = make("div", { class: "body" });
    main.append(
      make(
        "section",
        { id, "aria-labelledby": `${id}-title` },
        make("h2", { id: `${id}-title` }, title),
        make("p", { class: missing ? "missing" : "hint" }, missing || hint),
        body,
      ),
    );
    if (!missing) addContent(body);
    const link = { href: `#${id}`, class: missing ? "without" : null };
    menu.append(make("li", {}, make("a", link, title)));
  }
  document.querySelector("h1").textContent = run.name;
  document.getElementById("made").textContent = `made ${clock(run.made_at)}`;
  document.title = `${run.name} · moejax`;
  document.documentElement.dataset.ready = "true";
}

build();
