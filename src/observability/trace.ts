/** A trace per capture, with a span per stage. Spans are passed along, so stages may overlap. */
import {
  ROOT_CONTEXT,
  SpanStatusCode,
  trace,
  type Attributes,
  type Span,
  type Tracer,
  type TracerProvider,
} from '@opentelemetry/api';

export interface SpanEnd {
  /** The failure's kind and message; absent where the step went well. */
  readonly failure?: { readonly kind: string; readonly message: string } | null | undefined;
  readonly attributes?: Attributes | undefined;
}

/** One running step. `end` counts once. */
export interface StepTrace {
  end(how?: SpanEnd): void;
}

export interface CaptureTrace extends StepTrace {
  /** 32 hex digits, for logs. */
  readonly traceId: string;
  stage(name: string): StepTrace;
}

export interface CaptureTracer {
  begin(capture: { readonly captureId: string; readonly vmId: string }): CaptureTrace;
}

function finish(span: Span, how: SpanEnd): void {
  if (how.attributes !== undefined) span.setAttributes(how.attributes);
  const failure = how.failure ?? null;
  if (failure !== null) {
    span.setAttribute('varve.failure.kind', failure.kind);
    span.setStatus({ code: SpanStatusCode.ERROR, message: failure.message });
  }
  span.end();
}

const step = (span: Span): StepTrace => ({
  end(how = {}) {
    if (span.isRecording()) finish(span, how);
  },
});

export function createCaptureTracer(provider: TracerProvider): CaptureTracer {
  const tracer: Tracer = provider.getTracer('varve');
  return {
    begin({ captureId, vmId }) {
      const attributes = { 'varve.capture.id': captureId, 'varve.vm.id': vmId };
      const root = tracer.startSpan('capture', { attributes, root: true }, ROOT_CONTEXT);
      const within = trace.setSpan(ROOT_CONTEXT, root);
      return {
        ...step(root),
        traceId: root.spanContext().traceId,
        stage: (name) => step(tracer.startSpan(`stage ${name}`, {}, within)),
      };
    },
  };
}
