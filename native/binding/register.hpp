// What each binding file adds to the addon's exports.
#pragma once

#include <napi.h>

namespace varve {

void RegisterBitmap(Napi::Env env, Napi::Object exports);
void RegisterGuest(Napi::Env env, Napi::Object exports);
void RegisterMemory(Napi::Env env, Napi::Object exports);
void RegisterProcess(Napi::Env env, Napi::Object exports);
void RegisterScan(Napi::Env env, Napi::Object exports);
// Layers: declare RegisterLayer… here and call it in addon.cpp.

}  // namespace varve
