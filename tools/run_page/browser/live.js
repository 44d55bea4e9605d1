// Follow a run that goes on: ask the server for new data, and say how old the page is.

const POLL_MSEC = 1000;
const SLOW_POLL_MSEC = 5000;
const NUM_QUICK_POLLS = 10;
/** `aheadMsec`: how far the server's clock is ahead of the browser's. */
const live = { etag: null, at: 0, isReached: true, numFailures: 0, aheadMsec: 0 };

function startLive() {
  live.at = Date.now();
  sayAge();
  if (!page.data.live) return;
  setInterval(tick, 1000);
  poll();
}

/** Show how old things are. */
function tick() {
  sayAge();
  for (const view of page.views) view.tick?.();
}

/** Return the time of the server's clock, in seconds since 1970. */
function serverSec() {
  return (Date.now() + live.aheadMsec) / 1000;
}

/** Ask once, then again a second after the answer; every five seconds where ten
    questions had no answer. */
async function poll() {
  try {
    const answer = await fetch("data.json", {
      cache: "no-store",
      headers: live.etag ? { "If-None-Match": live.etag } : {},
      signal: AbortSignal.timeout(10_000),
    });
    const date = Date.parse(answer.headers.get("Date"));
    if (Number.isFinite(date)) live.aheadMsec = date - Date.now();
    if (answer.ok) {
      const data = await answer.json();
      live.etag = answer.headers.get("ETag");
      live.at = Date.now();
      reached(true);
      takeData(data);
    } else if (answer.status === 304) {
      live.at = Date.now();
      reached(true);
    } else reached(false);
  } catch (error) {
    if (!(
      error instanceof TypeError ||
      error.name === "TimeoutError" ||
      error instanceof SyntaxError
    )) {
      pollLater();
      throw error;
    }
    reached(false);
  }
  tick();
  pollLater();
}

function pollLater() {
  const isSlow = live.numFailures >= NUM_QUICK_POLLS;
  setTimeout(poll, isSlow ? SLOW_POLL_MSEC : POLL_MSEC);
}

/** Say aloud when the server goes or comes back, and nothing while it stays. */
function reached(isReached) {
  live.numFailures = isReached ? 0 : live.numFailures + 1;
  if (isReached === live.isReached) return;
  live.isReached = isReached;
  document.body.classList.toggle("lost", !isReached);
  announce(
    isReached
      ? "The server is reached again."
      : "The server is not reached; trying again.",
  );
}

function announce(text) {
  setText(document.getElementById("said"), text);
}

function sayAge() {
  const place = document.getElementById("age");
  if (!page.data.live) {
    setText(place, `made ${clock(page.data.made_at)}`);
    return;
  }
  const sec = Math.max(0, Math.round((Date.now() - live.at) / 1000));
  setText(
    place,
    live.isReached
      ? `updated ${sec} s ago`
      : `not reached; last update ${duration(sec)} ago`,
  );
}
