# Image of the daemon. Not built by the project's own tests: see docs/ops/running.md.
FROM node:20-bookworm AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential python3 liblz4-dev libzstd-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/varve
COPY . .
RUN npm ci --no-audit --no-fund \
 && npm run build \
 && npm prune --omit=dev --ignore-scripts

FROM node:20-bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends liblz4-1 libzstd1 \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/varve
COPY --from=build /opt/varve /opt/varve
RUN ln -s /opt/varve/bin/varve /usr/local/bin/varve
VOLUME /var/lib/varve
# Reading VMMs needs --pid=host and --cap-add=SYS_PTRACE.
ENTRYPOINT ["varve"]
CMD ["serve"]
