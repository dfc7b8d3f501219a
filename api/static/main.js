/**
 * The dashboard put together: pages, stream, key.
 * @module
 */

import { setUpCopying } from "./parts.js";
import { byId } from "./dom.js";
import { setUpKeys } from "./key.js";
import { startLive } from "./live.js";
import { bulkPage } from "./pages/bulk.js";
import { bulksPage } from "./pages/bulks.js";
import { comparePage } from "./pages/compare.js";
import { jobPage } from "./pages/job.js";
import { jobsPage } from "./pages/jobs.js";
import { overviewPage } from "./pages/overview.js";
import { playgroundPage } from "./pages/playground.js";
import { startRouter } from "./router.js";

byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address after # names pages
  byId("main").focus();
});
setUpKeys();
setUpCopying();
startLive();
startRouter({
  "": { title: "Overview", page: overviewPage },
  jobs: { title: "Jobs", page: jobsPage },
  job: { title: "Job", page: jobPage },
  bulks: { title: "Bulks", page: bulksPage },
  bulk: { title: "Bulk", page: bulkPage },
  compare: { title: "Compare", page: comparePage },
  playground: { title: "Playground", page: playgroundPage },
});
