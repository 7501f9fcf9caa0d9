// Run model.onnx of a bundle in onnxruntime on the golden inputs, at each of their batch sizes.
//
//     onnx_main dist/net
#include <onnxruntime_cxx_api.h>

#include "golden.h"

static const std::map<std::string, ONNXTensorElementDataType> types{
    {"F32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},  {"F64", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE},
    {"F16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16}, {"I64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
    {"I32", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},  {"I8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
    {"U8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},   {"BOOL", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},
};

int main(int argc, char** argv) try {
    if (argc != 2) throw std::runtime_error("usage: onnx_main BUNDLE");
    const std::string bundle = argv[1];
    Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "bundle");
    // External data (model.onnx.data) is found next to the file.
    Ort::Session session(env, (bundle + "/model.onnx").c_str(), Ort::SessionOptions());
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    bool ok = true;
    for (auto& [name, call] : read_golden(bundle)) {
        std::vector<const char*> input_names, output_names;
        std::vector<Ort::Value> inputs;
        for (auto& [input, tensor] : call.inputs) {
            input_names.push_back(input.c_str());
            inputs.push_back(Ort::Value::CreateTensor(memory, tensor.bytes.data(), tensor.bytes.size(),
                                                      tensor.shape.data(), tensor.shape.size(),
                                                      types.at(tensor.dtype)));
        }
        for (auto& [output, tensor] : call.outputs) output_names.push_back(output.c_str());
        auto outputs = session.Run(Ort::RunOptions(), input_names.data(), inputs.data(), inputs.size(),
                                   output_names.data(), output_names.size());
        size_t index = 0;
        for (auto& [output, tensor] : call.outputs) {
            auto& value = outputs[index++];
            if (value.GetTensorTypeAndShapeInfo().GetShape() != tensor.shape)
                throw std::runtime_error(output + " has another shape than in the golden data");
            ok &= report(name, output, error_of(value.GetTensorData<char>(), tensor));
        }
    }
    return ok ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "onnx_main: %s\n", error.what());
    return 2;
}
