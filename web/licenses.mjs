// The licenses of the libraries that the built page and the chart code of reports contain.
import { readFileSync, readdirSync, writeFileSync } from "node:fs";

const parts = ["echarts", "zrender", "tslib", "preact"].map((name) => {
  const folder = `node_modules/${name}`;
  const { version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  const texts = readdirSync(folder).filter((file) => /^(LICENSE|NOTICE)/.test(file)).map((file) => readFileSync(`${folder}/${file}`, "utf8"));
  return `${name} ${version} (${license})\n\n${texts.join("\n")}`;
});
writeFileSync("../src/ridgeline/web/static/LICENSES.txt", parts.join("\n\n----------------------------------------\n\n"));
