// What each binding file adds to the addon's exports.
#pragma once

#include <napi.h>

namespace varve {

void RegisterBitmap(Napi::Env env, Napi::Object exports);
void RegisterFiles(Napi::Env env, Napi::Object exports);
void RegisterGuest(Napi::Env env, Napi::Object exports);
void RegisterMemory(Napi::Env env, Napi::Object exports);
void RegisterProcess(Napi::Env env, Napi::Object exports);
void RegisterScan(Napi::Env env, Napi::Object exports);
void RegisterThreads(Napi::Env env, Napi::Object exports);
void RegisterLayerCompress(Napi::Env env, Napi::Object exports);
void RegisterLayerReader(Napi::Env env, Napi::Object exports);
void RegisterLayerSink(Napi::Env env, Napi::Object exports);

}  // namespace varve
