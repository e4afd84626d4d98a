{
  "variables": {
    # The small VM's guest is built where its sources are.
    "minivm_sources": "<!(ls native/minivm 2>/dev/null | grep -c '[.]cpp$' || true)"
  },
  "target_defaults": {
    "include_dirs": ["<!(node -p \"require('node-addon-api').include_dir\")", "native"],
    # SWALLOW: a worker that is being terminated can neither set a property nor throw; without it
    # node-addon-api answers that with a fatal error, which ends the whole process.
    "defines": ["NODE_API_SWALLOW_UNTHROWABLE_EXCEPTIONS", "NAPI_VERSION=8", "NODE_ADDON_API_DISABLE_CPP_EXCEPTIONS", "NODE_ADDON_API_DISABLE_DEPRECATED", "_GNU_SOURCE", "_FILE_OFFSET_BITS=64"],
    "cflags_cc!": ["-fno-rtti", "-std=gnu++17"],
    "cflags_cc": ["-std=c++20", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-cast-function-type", "-Wno-unused-parameter", "-fno-exceptions"],
    "cflags": ["-fvisibility=hidden"]
  },
  "targets": [
    {
      "target_name": "varve",
      "sources": ["<!@(ls native/core/*.cpp native/binding/*.cpp)"],
      "libraries": ["-llz4", "-lzstd"]
    },
    {
      "target_name": "minivm",
      "conditions": [
        ["minivm_sources==0", { "type": "none" }, {
          "sources": ["<!@(ls native/minivm/*.cpp 2>/dev/null || true)"]
        }]
      ]
    },
    {
      # A plain program, no addon: resumes paused VMs when the daemon dies.
      "target_name": "varve-supervisor",
      "type": "executable",
      "sources": ["<!@(ls native/supervisor/*.cpp)", "native/core/process.cpp", "native/core/syscalls.cpp"],
      "libraries": ["-lpthread"]
    },
    {
      # The bare guest that real VMMs boot: no program of this host, so it has rules of its own.
      "target_name": "varve-guest",
      "type": "none",
      "conditions": [
        ["target_arch=='x64'", {
          "actions": [{
            "action_name": "guest",
            "inputs": ["<!@(ls native/guest/*)"],
            "outputs": ["<(PRODUCT_DIR)/varve-guest"],
            "action": ["make", "--no-print-directory", "-C", "native/guest", "OUT=<(PRODUCT_DIR)"]
          }]
        }]
      ]
    }
  ]
}
