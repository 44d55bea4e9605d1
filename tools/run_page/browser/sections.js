// The sections of the page: what each says, what it shows, and what it lacks.

/** Return whether no run has any of these curves. */
const none = (...names) =>
  runs().every((of) => !names.some((name) => hasCurve(of, name)));

/** The sections in order. `missing()` returns why there is nothing to show and how to
    get it, or an empty text. `ofOneRun` sections show the chosen run. */
const SECTIONS = [
  {
    id: "overview",
    title: "Overview",
    hint:
      "Where the run stands. Good: it goes on or has finished, " +
      "with high goodput and device max/mean near 1.",
    missing: () => "",
    build: overview,
  },
  {
    id: "loss",
    title: "Loss",
    hint:
      "How well the model predicts the next token. Good: it falls, and the " +
      "held-out points stay close to the curve.",
    missing: () => (none("loss") ? "No loss was recorded: let the run do a step." : ""),
    build: (body) => {
      addCurves(body, {
        id: "loss-curve",
        title: "Loss",
        unit: "nats per token",
        height: 340,
        smooth: true,
        points: true,
        series: [{ curve: "loss", label: "training" }],
      });
      addCurves(body, {
        id: "grad-norm",
        title: "Gradient norm",
        unit: "before clipping",
        height: 200,
        smooth: true,
        clip: true,
        fromZero: true,
        series: [{ curve: "grad_norm", label: "gradient norm" }],
      });
      addCurves(body, {
        id: "lr",
        title: "Learning rate",
        unit: "",
        height: 180,
        fromZero: true,
        series: [{ curve: "lr", label: "learning rate" }],
      });
      if (runs().some((of) => isEverAbove0(of, "skipped"))) {
        addCurves(body, {
          id: "skipped",
          title: "Skipped updates",
          unit: "share of steps",
          height: 180,
          fromZero: true,
          series: [{ curve: "skipped", label: "skipped" }],
        });
      }
    },
  },
  {
    id: "speed",
    title: "Speed",
    hint: "How fast steps are. Good: flat, and high for tokens and MFU.",
    missing: () =>
      none("tok_per_sec", "step_msec")
        ? "No times were recorded: let the run do a step."
        : "",
    build: (body) => {
      addCurves(body, {
        id: "tok-per-sec",
        title: "Tokens per second",
        unit: "all devices",
        smooth: true,
        clip: true,
        fromZero: true,
        marks: true,
        series: [{ curve: "tok_per_sec", label: "tokens per second" }],
      });
      addCurves(body, {
        id: "step-msec",
        title: "Time of a step",
        unit: "ms",
        smooth: true,
        clip: true,
        fromZero: true,
        marks: true,
        series: [{ curve: "step_msec", label: "ms a step" }],
      });
      if (none("mfu"))
        body.append(
          make(
            "p",
            { class: "hint" },
            "No MFU: no peak FLOPs are known for this device.",
          ),
        );
      addCurves(body, {
        id: "mfu",
        title: "MFU",
        unit: "share of peak FLOPs",
        smooth: true,
        clip: true,
        fromZero: true,
        series: [{ curve: "mfu", label: "MFU" }],
      });
    },
  },
  {
    id: "goodput",
    title: "Where the time went",
    hint:
      "Shares of the wall time of process 0. Good: nearly all " +
      "of it is useful, that is, in steps whose result was kept.",
    missing: () =>
      runs().some((of) => of.goodput)
        ? ""
        : "No goodput.jsonl: train/main.py writes it as it runs.",
    build: addGoodput,
  },
  {
    id: "load",
    title: "Load",
    ofOneRun: true,
    hint:
      "How evenly tokens are spread over experts (the router's " +
      "work) and over devices (the balancer's). Good: device max/mean near 1.",
    missing: () =>
      frames(run().load) || !none("device_max_over_mean", "expert_max_over_mean")
        ? ""
        : "No loads were recorded: set Train.log_load_every_steps, and let the run get that far.",
    build: (body) => {
      if (frames(run().load)) loadMap(body);
      else
        body.append(
          make(
            "p",
            { class: "missing" },
            "No table of experts: Train.log_load_every_steps records one.",
          ),
        );
      addCurves(body, {
        id: "device-ratio",
        title: "Device max/mean",
        unit: "worst layer; 1 is even",
        marks: true,
        smooth: true,
        series: [
          { curve: "device_max_over_mean", label: "plan in use" },
          { curve: "home_device_max_over_mean", label: "home plan" },
        ],
      });
      addLayerCurve(body, "device_max_over_mean");
      addCurves(body, {
        id: "expert-ratio",
        title: "Expert max/mean",
        unit: "worst layer; 1 is even",
        smooth: true,
        series: [{ curve: "expert_max_over_mean", label: "expert max/mean" }],
        height: 220,
      });
      addLayerCurve(body, "expert_max_over_mean");
    },
  },
  {
    id: "layer",
    title: "One layer",
    ofOneRun: true,
    hint:
      "Which device holds which experts, and how full it is, " +
      "before and after the change nearest to a step. Good: all bars end at the mark of the mean.",
    missing: () =>
      planTables(run()).length
        ? ""
        : "No plans.jsonl: runs of this version of moejax and later write it.",
    build: oneLayer,
  },
  {
    id: "decisions",
    title: "Decisions",
    ofOneRun: true,
    hint:
      "What the balancer weighed, what it expected to save " +
      "and to pay, and what came of it. Good: measured gains near the predicted ones.",
    missing: () =>
      run().decisions?.length
        ? ""
        : "No decisions: Balance.policy = 'home', or the load was even so far.",
    build: decisionSection,
  },
  {
    id: "exchange",
    title: "Exchange",
    hint: "How rows travel between devices. Good: one round, nothing dropped.",
    missing: () =>
      none("rounds", "fullest_pair") && !run().bytes?.length
        ? "No exchange was recorded: experts are on one device, or no step was done."
        : "",
    build: (body) => {
      addCurves(body, {
        id: "rounds",
        title: "Rounds of the exchange",
        unit: "worst layer; 1 is enough",
        height: 200,
        caption:
          "Round 0 carries rows_per_peer rows from a device to each other one, and each " +
          "later round a quarter of that. For example, with 128 a fullest pair of 250 takes " +
          "1 + (250 - 128) / 32 rounds, rounded up: 5.",
        series: [{ curve: "rounds", label: "rounds" }],
        fromZero: true,
      });
      addCurves(body, {
        id: "fullest-pair",
        title: "Fullest pair of devices",
        unit: "rows, worst layer",
        height: 220,
        smooth: true,
        fromZero: true,
        marks: true,
        series: [{ curve: "fullest_pair", label: "fullest pair" }],
      });
      addShares(body);
      addBytes(body);
    },
  },
  {
    id: "routers",
    title: "Routers",
    ofOneRun: true,
    hint:
      "How the routers choose. Good: entropy that falls " +
      "slowly and no dead experts, which get no token at all.",
    missing: () =>
      none("router_entropy", "dead_experts")
        ? "No figures of routers: runs of this version and later " +
          "record router_entropy and dead_experts."
        : "",
    build: (body) => {
      addCurves(body, {
        id: "entropy",
        title: "Entropy of a token's choice",
        unit: "nats, mean of layers",
        smooth: true,
        series: [{ curve: "router_entropy", label: "entropy" }],
        height: 220,
      });
      addLayerCurve(body, "router_entropy");
      addCurves(body, {
        id: "dead",
        title: "Dead experts",
        unit: "in all layers",
        fromZero: true,
        height: 200,
        series: [{ curve: "dead_experts", label: "dead experts" }],
      });
      addDeadByLayer(body);
    },
  },
  {
    id: "model",
    title: "The model's prediction",
    hint:
      "What the cost model expects of a step beside what the clock " +
      "said. Good: both are of the same order and jump at the same steps. A constant " +
      "gap between them does no harm.",
    missing: () =>
      none("modelled_step_msec")
        ? "No modelled times were recorded: runs of this version write " +
          "modelled_step_msec."
        : "",
    build: prediction,
  },
  {
    id: "memory",
    title: "Memory",
    hint: "Memory in use. Good: flat after the first steps.",
    missing: () =>
      none("host_memory_gib", "device_memory_gib")
        ? "No memory was recorded: runs of this version and " +
          "later write host_memory_gib."
        : "",
    build: (body) => {
      addCurves(body, {
        id: "device-memory",
        title: "Fullest device",
        unit: "GiB",
        fromZero: true,
        height: 220,
        series: [
          { curve: "device_memory_gib", label: "in use" },
          { curve: "peak_device_memory_gib", label: "peak" },
        ],
      });
      if (none("device_memory_gib"))
        body.append(
          make(
            "p",
            { class: "hint" },
            "No figures of devices: this back end, " +
              "such as CPUs, does not count its memory.",
          ),
        );
      addCurves(body, {
        id: "host-memory",
        title: "Process 0 on its host",
        unit: "GiB resident",
        fromZero: true,
        height: 220,
        series: [{ curve: "host_memory_gib", label: "resident" }],
      });
    },
  },
  {
    id: "configuration",
    title: "Configuration",
    hint: "Every field of the configuration, as the run resolved it.",
    missing: () =>
      runs().some((of) => of.config.length)
        ? ""
        : "No config.gin in the run directory.",
    build: configuration,
  },
];
