/**
 * Puts the OpenTelemetry parts together: one set of instruments, read by /metrics and pushed by
 * OTLP.
 */
import { OTLPMetricExporter } from '@opentelemetry/exporter-metrics-otlp-http';
import { OTLPTraceExporter } from '@opentelemetry/exporter-trace-otlp-http';
import { resourceFromAttributes } from '@opentelemetry/resources';
import { MeterProvider, PeriodicExportingMetricReader } from '@opentelemetry/sdk-metrics';
import {
  BasicTracerProvider,
  BatchSpanProcessor,
  TraceIdRatioBasedSampler,
} from '@opentelemetry/sdk-trace-base';
import { createMetrics, type Metrics } from './metrics.ts';
import { observeProcess } from './process-metrics.ts';
import { PrometheusReader } from './prometheus.ts';
import { createCaptureTracer, type CaptureTracer } from './trace.ts';

export interface TelemetryOptions {
  readonly nodeId: string;
  readonly version: string;
  /** Base URL of an OTLP/HTTP collector; nothing is pushed without it. */
  readonly otlpEndpoint?: string | undefined;
  readonly otlpIntervalMs: number;
  /** Share of captures that are traced, 0 to 1. */
  readonly traceShare: number;
}

export interface Telemetry {
  readonly metrics: Metrics;
  readonly tracer: CaptureTracer;
  /** Prometheus text of everything as of now. */
  readonly render: () => Promise<string>;
  /** Pushes what is left, waiting a few seconds at most, and stops every timer. Never throws. */
  readonly close: () => Promise<void>;
}

const CLOSE_TIMEOUT_MS = 3_000;

const signalUrl = (endpoint: string, path: string): string =>
  `${endpoint.replace(/\/+$/, '')}/v1/${path}`;

function meterReaders(options: TelemetryOptions, prometheus: PrometheusReader) {
  if (options.otlpEndpoint === undefined) return [prometheus];
  const push = new PeriodicExportingMetricReader({
    exporter: new OTLPMetricExporter({ url: signalUrl(options.otlpEndpoint, 'metrics') }),
    exportIntervalMillis: options.otlpIntervalMs,
    exportTimeoutMillis: Math.min(options.otlpIntervalMs, 10_000),
  });
  return [prometheus, push];
}

/** Starts telemetry. A collector that does not answer costs nothing but the attempt. */
export function createTelemetry(options: TelemetryOptions): Telemetry {
  const resource = resourceFromAttributes({
    'service.name': 'varve',
    'service.version': options.version,
    'service.instance.id': options.nodeId,
  });
  const prometheus = new PrometheusReader();
  const meters = new MeterProvider({ resource, readers: meterReaders(options, prometheus) });
  const spanProcessors =
    options.otlpEndpoint === undefined
      ? []
      : [
          new BatchSpanProcessor(
            new OTLPTraceExporter({ url: signalUrl(options.otlpEndpoint, 'traces') }),
          ),
        ];
  const tracers = new BasicTracerProvider({
    resource,
    spanProcessors,
    sampler: new TraceIdRatioBasedSampler(options.traceShare),
  });
  const stopProcess = observeProcess(meters);
  return {
    metrics: createMetrics(meters),
    tracer: createCaptureTracer(tracers),
    render: () => prometheus.render(),
    async close() {
      stopProcess();
      const patience = new Promise((resolve) => {
        setTimeout(resolve, CLOSE_TIMEOUT_MS).unref();
      });
      const flushed = Promise.allSettled([
        meters.shutdown({ timeoutMillis: CLOSE_TIMEOUT_MS }),
        tracers.shutdown(),
      ]);
      await Promise.race([flushed, patience]);
    },
  };
}
