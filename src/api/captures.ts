/** `/v1/captures`: show, list, cancel, and events as they happen. */
import { createRoute, z } from '@hono/zod-openapi';
import type { Context } from 'hono';
import { streamSSE, type SSEStreamingApi } from 'hono/streaming';
import type { CaptureEvent, Captures, CaptureView } from '../capture/types.ts';
import { captureId } from '../units.ts';
import { needs } from './auth.ts';
import { problemResponses, refused, valueOf } from './problem.ts';
import { newRouter, type ApiEnv } from './router.ts';
import { captureSchema, jsonAnswer, nameSchema } from './schemas.ts';

const params = z.object({ captureId: nameSchema });
const tags = ['captures'];

const list = createRoute({
  method: 'get',
  path: '/v1/captures',
  tags,
  summary: 'Captures of all VMs, newest first; at most 1000.',
  middleware: needs('read'),
  responses: {
    200: jsonAnswer(z.object({ captures: z.array(captureSchema).readonly() }), 'The captures.'),
    ...problemResponses,
  },
});

const show = createRoute({
  method: 'get',
  path: '/v1/captures/{captureId}',
  tags,
  summary: 'One capture; a failed one with its reason.',
  middleware: needs('read'),
  request: { params },
  responses: { 200: jsonAnswer(captureSchema, 'The capture.'), ...problemResponses },
});

const cancel = createRoute({
  method: 'post',
  path: '/v1/captures/{captureId}/cancel',
  tags,
  summary: 'Abort a capture that has not committed. The VM runs again within a second.',
  middleware: needs('capture'),
  request: { params },
  responses: { 200: jsonAnswer(captureSchema, 'The capture as it ended.'), ...problemResponses },
});

const events = createRoute({
  method: 'get',
  path: '/v1/captures/{captureId}/events',
  tags,
  summary:
    'Server-sent events: `status` with the capture now and whenever it changes, `stage` as ' +
    'stages start and end. The stream ends when the capture has.',
  middleware: needs('read'),
  request: { params },
  responses: {
    200: {
      description: 'The events.',
      content: { 'text/event-stream': { schema: z.string() } },
    },
    ...problemResponses,
  },
});

/** Proxies drop connections that say nothing for long. */
const KEEP_ALIVE_MS = 15_000;

const message = (event: string, data: unknown) => ({ event, data: JSON.stringify(data) });

async function forward(
  stream: SSEStreamingApi,
  source: AsyncIterator<CaptureEvent>,
  first: Promise<IteratorResult<CaptureEvent>>,
): Promise<void> {
  for (let next = await first; next.done !== true; next = await source.next()) {
    const event = next.value;
    await (event.type === 'stage'
      ? stream.writeSSE(message('stage', { stage: event.stage, state: event.state }))
      : stream.writeSSE(message('status', event.capture)));
  }
}

function sendEvents(c: Context<ApiEnv>, captures: Captures, view: CaptureView): Response {
  const id = view.captureId;
  return streamSSE(c, async (stream) => {
    const stop = new AbortController();
    stream.onAbort(() => stop.abort());
    // Subscribed before the first state is sent, so that nothing falls between the two.
    const source = captures.watch(id, stop.signal)[Symbol.asyncIterator]();
    const first = source.next();
    const keepAlive = setInterval(() => void stream.write(': still here\n\n'), KEEP_ALIVE_MS);
    try {
      await stream.writeSSE(message('status', captures.getCapture(id) ?? view));
      await forward(stream, source, first);
      await stream.writeSSE(message('status', captures.getCapture(id) ?? view));
    } catch (error) {
      if (!stop.signal.aborted) throw error;
    } finally {
      clearInterval(keepAlive);
      stop.abort();
      await source.return?.();
    }
  });
}

export function captureRoutes({ captures }: { readonly captures: Captures }) {
  const known = (id: string): CaptureView => {
    const view = captures.getCapture(captureId(id));
    if (view === undefined) throw refused('capture-unknown', `there is no capture ${id}`);
    return view;
  };
  return newRouter()
    .openapi(list, (c) => c.json({ captures: captures.listCaptures() }, 200))
    .openapi(show, (c) => c.json(known(c.req.valid('param').captureId), 200))
    .openapi(cancel, async (c) => {
      const { captureId: id } = known(c.req.valid('param').captureId);
      return c.json(valueOf(await captures.cancelCapture(id)), 200);
    })
    .openapi(events, (c) => sendEvents(c, captures, known(c.req.valid('param').captureId)));
}
