/** The API reference as one page of plain HTML: no script, nothing fetched from elsewhere. */
import { html, raw } from 'hono/html';
import { httpStatus } from './problem.ts';

interface Operation {
  readonly summary?: string;
  readonly tags?: readonly string[];
  readonly parameters?: readonly unknown[];
  readonly requestBody?: unknown;
  readonly responses?: Readonly<Record<string, unknown>>;
}

interface Described {
  readonly info: { readonly title: string; readonly version: string };
  readonly paths?: unknown;
  readonly components?: { readonly schemas?: unknown } | undefined;
}

const style = raw(`
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; }
  code, pre { font: 14px/1.4 ui-monospace, monospace; }
  pre { background: #8881; padding: .75rem; overflow: auto; }
  summary { cursor: pointer; padding: .25rem 0; }
  table { border-collapse: collapse; } td, th { padding: .1rem 1rem .1rem 0; text-align: left; }
`);

const page = (title: string, body: unknown) =>
  html`<!doctype html>
    <html lang="en">
      <head>
        <meta charset="utf-8" />
        <title>${title}</title>
        <style>
          ${style}
        </style>
      </head>
      <body>
        ${body}
      </body>
    </html> `;

const pretty = (value: unknown): string => JSON.stringify(value, null, 2);

const methods = ['get', 'post', 'put', 'patch', 'delete'] as const;

function operationsOf(document: Described): [method: string, path: string, Operation][] {
  const paths = (document.paths ?? {}) as Record<string, Record<string, Operation>>;
  return Object.entries(paths).flatMap(([path, item]) =>
    methods.flatMap((method): [string, string, Operation][] => {
      const operation = item[method];
      return operation === undefined ? [] : [[method.toUpperCase(), path, operation]];
    }),
  );
}

const operationBlock = ([method, path, operation]: [string, string, Operation]) =>
  html`<details>
    <summary><code>${method} ${path}</code> ${operation.summary ?? ''}</summary>
    <pre>
${pretty({
        parameters: operation.parameters,
        requestBody: operation.requestBody,
        responses: operation.responses,
      })}</pre>
  </details>`;

export async function docsPage(document: Described): Promise<string> {
  const blocks = operationsOf(document).map(operationBlock);
  const { title, version } = document.info;
  const body = html`<h1>${title} ${version}</h1>
    <p>
      The machine-readable form is <a href="/openapi.json">/openapi.json</a>. Errors are
      <a href="/docs/problems">problem documents</a>.
    </p>
    ${blocks}
    <h2>Schemas</h2>
    <pre>${pretty(document.components?.schemas ?? {})}</pre>`;
  return (await page(title, body)).toString();
}

export async function problemsPage(): Promise<string> {
  const rows = Object.entries(httpStatus).map(
    ([code, status]) =>
      html`<tr id="${code}">
        <td><code>${code}</code></td>
        <td>${status}</td>
      </tr>`,
  );
  const body = html`<h1>Problem codes</h1>
    <table>
      <tr>
        <th>code</th>
        <th>status</th>
      </tr>
      ${rows}
    </table>`;
  return (await page('Problem codes', body)).toString();
}
